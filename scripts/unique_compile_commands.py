#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a compilation database that lists each source file once.

clang-tidy checks a file once per command: it would check a test that is linked into four programs
four times. Of several commands for a file, the first is kept.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Read <build>/compile_commands.json and write <output>/compile_commands.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("output", type=Path)
    parsed = parser.parse_args(arguments)
    first: dict[str, dict[str, str]] = {}
    for command in json.loads((parsed.build / "compile_commands.json").read_text()):
        first.setdefault(command["file"], command)
    parsed.output.mkdir(parents=True, exist_ok=True)
    (parsed.output / "compile_commands.json").write_text(json.dumps(list(first.values()), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
