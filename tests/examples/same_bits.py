# SPDX-License-Identifier: Apache-2.0
"""Trains two steps with a program of examples/cpp, and the first step in Python as well.

Prints the outputs of both and exits with 1 if the running statistics differ in any bit.
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
    """Run a command and return its output."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def statistics(output: str) -> str:
    """Return the hash of the running statistics from the output of a program."""
    found = re.search("^running statistics after the first step: ([0-9a-f]{16})$", output, re.M)
    if found is None:
        raise ValueError(f"expected a hash of the running statistics, got:\n{output}")
    return found[1]


def main() -> int:
    """Compare the two, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scope", required=True, help="scope of the statistics")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks of the program")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="program, with its launcher")
    given = parser.parse_args()
    batch = (f"--ranks={given.ranks}", f"--images-per-rank={IMAGES_PER_RANK}")
    with tempfile.TemporaryDirectory() as folder:
        scenes = str(Path(folder) / "scenes")
        write = (sys.executable, str(DEMO / "write_scenes.py"), scenes, f"--steps={STEPS}", *batch)
        of_python = run(*write, f"--first-step={given.scope}")
        of_program = run(*given.program, f"--scenes={scenes}", f"--scope={given.scope}")
    same = statistics(of_program) == statistics(of_python)
    if not same:
        print(of_program, of_python, sep="\n", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
