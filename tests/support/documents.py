# SPDX-License-Identifier: Apache-2.0
"""Blocks of code in documents, and running them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

FENCED = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(document: str, languages: tuple[str, ...]) -> int:
    """Run a document's blocks of these languages, one after the other in one namespace.

    Args:
        document: Its path from the root of the repository.
        languages: What stands after the three backticks that a block begins with.

    Returns:
        How many blocks have run.
    """
    text = (ROOT / document).read_text()
    blocks = [match for match in FENCED.finditer(text) if match["language"] in languages]
    namespace: dict[str, object] = {"__name__": document}
    for block in blocks:
        # Line numbers of a traceback are the document's.
        above = "\n" * text.count("\n", 0, block.start("code"))
        exec(compile(above + block["code"], ROOT / document, "exec"), namespace)
    return len(blocks)
