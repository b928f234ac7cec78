# SPDX-License-Identifier: Apache-2.0
"""Runs the code blocks and commands of documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)

FENCED = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^ {4}[^\n]*\n)+", re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")


def blocks_of(document: str) -> list[tuple[str, str]]:
    """Return the language and the code of each fenced block of a document.

    Args:
        document: Path of the document, relative to the root of the repository.
    """
    text = (ROOT / document).read_text()
    return [(match["language"], match["code"]) for match in FENCED.finditer(text)]


def commands_in(document: str) -> list[str]:
    """Return all lines of code of a document that could be commands, without comments.

    Args:
        document: Path of the document, relative to the root of the repository.

    Returns:
        The lines of shell blocks and indented blocks, with continuation lines joined, and the text
        between single backticks.
    """
    text = (ROOT / document).read_text()
    code = [code for language, code in blocks_of(document) if language.split()[:1] == ["sh"]]
    prose = FENCED.sub("", text)
    code += INDENTED.findall(prose)
    lines = "".join(code).replace("\\\n", " ").splitlines()
    lines += [" ".join(inline.split()) for inline in INLINE.findall(INDENTED.sub("", prose))]
    return [line.partition(" #")[0].strip() for line in lines]


def run_blocks(document: str, languages: tuple[str, ...]) -> int:
    """Run a document's blocks of the given languages in order, in a single namespace.

    Args:
        document: Path of the document, relative to the root of the repository.
        languages: Accepted texts after the three backticks of a block.

    Returns:
        The number of blocks that ran.
    """
    text = (ROOT / document).read_text()
    blocks = [match for match in FENCED.finditer(text) if match["language"] in languages]
    namespace: dict[str, object] = {"__name__": document}
    for block in blocks:
        # Line numbers in a traceback are then those of the document.
        above = "\n" * text.count("\n", 0, block.start("code"))
        exec(compile(above + block["code"], ROOT / document, "exec"), namespace)
    return len(blocks)


@dataclass(frozen=True)
class Command:
    """A command of a tutorial, the files at that point, and the command's output."""

    command: str
    files: dict[str, str]
    output: str


def commands(document: str) -> Iterator[Command]:
    """Follow a tutorial.

    A block that begins with ```python NAME is a file, and one with ```diff NAME changes it. A block
    with ```sh is a command, and the next one with ```text is its output.

    Args:
        document: Path of the document, relative to the root of the repository.

    Yields:
        The commands of the tutorial, in order.
    """
    files: dict[str, str] = {}
    command = ""
    for block in FENCED.finditer((ROOT / document).read_text()):
        language, _, name = block["language"].partition(" ")
        if language == "python":
            files[name] = block["code"]
        elif language == "diff":
            files[name] = changed(files[name], block["code"])
        elif language == "sh":
            command = block["code"].strip()
        elif language == "text":
            yield Command(command, dict(files), block["code"])


def changed(text: str, diff: str) -> str:
    """Apply a diff without line numbers; its old lines must occur exactly once in the text."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    after = "".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, diff
    return text.replace(before, after)
