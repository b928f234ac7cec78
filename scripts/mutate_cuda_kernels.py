#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write copies of the CUDA kernels' source, each of which lacks one thing that threads need.

For every barrier, fence, shuffle, vote and atomic operation in ``normscope/kernels/cuda/*.cuh`` a
folder is made in which that one is replaced by what a thread could do alone; the other files there
are as they are. The folders' names are printed, one a line. A suite that passes on such a copy does
not test what was taken away.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

KERNELS = Path("normscope/kernels/cuda")

# What the copy is called after, what is replaced, by what. An argument has commas in brackets only.
ARGUMENT = r"((?:[^(),\[\]]|\[[^\]]*\]|\([^()]*\))+)"
MUTATIONS = {
    "barrier": (r"__syncthreads\(\);", ";"),
    "shuffle_down": (rf"__shfl_down_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"\2"),
    "shuffle": (rf"__shfl_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"\2"),
    "vote": (rf"__any_sync\({ARGUMENT}, {ARGUMENT}\)", r"(\2)"),
    "fence": (r"__threadfence\(\);", ";"),
    "ticket": (
        rf"atomicInc\({ARGUMENT}, {ARGUMENT}\)",
        r"(*(\1) == (\2) ? (*(\1) = 0, (\2)) : (*(\1))++)",
    ),
    "atomic": (rf"atomicAdd\({ARGUMENT}, {ARGUMENT}\);", r"*(\1) += \2;"),
}


def mutants(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield kind, line and text of every copy that lacks one thing."""
    for kind, (pattern, replacement) in MUTATIONS.items():
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            mutated = text[: match.start()] + match.expand(replacement) + text[match.end() :]
            yield kind, line, mutated


def calls(text: str) -> int:
    """Return how many calls there are to replace."""
    names = r"__syncthreads|__shfl\w*|__any_sync|__ballot\w*|__syncwarp|atomic\w+|__threadfence\w*"
    return len(re.findall(rf"\b(?:{names})\(", text))


def main(arguments: Sequence[str]) -> int:
    """Write the copies and print their folders' names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the root of the tree that is copied from")
    parser.add_argument("into", type=Path, help="an empty folder, or one of an earlier run")
    options = parser.parse_args(arguments)

    shutil.rmtree(options.into, ignore_errors=True)
    for path in sorted((options.source / KERNELS).glob("*.cuh")):
        text = path.read_text()
        found = list(mutants(text))
        if len(found) != calls(text):
            print(f"{path}: {calls(text)} calls, but {len(found)} mutations of them")
            return 1
        for kind, line, mutated in found:
            name = f"{path.stem}_line_{line}_without_{kind}"
            folder = options.into / name / KERNELS
            shutil.copytree(options.source / KERNELS, folder)
            (folder / path.name).write_text(mutated)
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
