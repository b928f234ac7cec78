# SPDX-License-Identifier: Apache-2.0
"""Trains two steps with a program of examples/cpp, and the first of them in Python.

Exits with 1, and the outputs of both, where the running statistics differ in a bit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "segmentation"
IMAGES_PER_RANK = 2
STEPS = 2


def run(*command: str) -> str:
    """Runs a command; its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def statistics(output: str) -> str:
    """The hash of the running statistics that a program has printed."""
    found = re.search("^running statistics after the first step: ([0-9a-f]{16})$", output, re.M)
    if found is None:
        raise ValueError(f"expected a hash of the running statistics, got:\n{output}")
    return found[1]


def main() -> int:
    """Compares; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scope", required=True, help="of the statistics")
    parser.add_argument("--ranks", type=int, required=True, help="that the program has")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="and what starts it")
    given = parser.parse_args()
    steps = f"--steps={STEPS}"
    batch = (f"--ranks={given.ranks}", f"--images-per-rank={IMAGES_PER_RANK}")
    with tempfile.TemporaryDirectory() as folder:
        scenes = str(Path(folder) / "scenes")
        write = (sys.executable, str(DEMO / "write_scenes.py"), scenes, steps, *batch)
        of_python = run(*write, f"--first-step={given.scope}")
        of_program = run(*given.program, f"--scenes={scenes}", steps, f"--scope={given.scope}")
    same = statistics(of_program) == statistics(of_python)
    if not same:
        print(of_program, of_python, sep="\n", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
