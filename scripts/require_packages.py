#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Name the packages of requirements files that this environment lacks.

Used where an existing environment takes the place of `.venv`: nothing is installed into it, and its
versions are its owner's choice, so presence is all that is asked.
"""

import importlib.metadata
import re
import shutil
import sys
from pathlib import Path

# Packages that are wanted for a program only, which the system may have just as well.
PROGRAMS = {"clang-format", "clang-tidy", "cmake", "ninja", "ruff"}


def required_packages(requirements: Path) -> set[str]:
    """Return the names in a requirements file and in those that it includes with -r."""
    names: set[str] = set()
    for line in requirements.read_text().splitlines():
        if line.startswith("-r "):
            names |= required_packages(requirements.parent / line.removeprefix("-r "))
        elif match := re.match(r"[A-Za-z0-9._-]+", line):
            names.add(match.group())
    return names


def is_present(package: str) -> bool:
    """Whether the environment has the package, or the system the program that it brings."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return package in PROGRAMS and shutil.which(package) is not None
    return True


def main(requirements: list[str]) -> int:
    """Print what is missing; return the exit status."""
    wanted = set().union(*(required_packages(Path(path)) for path in requirements))
    missing = sorted(package for package in wanted if not is_present(package))
    if missing:
        print(
            f"{sys.prefix} lacks {', '.join(missing)}. Install them there, or leave VENV unset to "
            "have everything set up in .venv.",
            file=sys.stderr,
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
