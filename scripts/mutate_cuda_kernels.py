#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write mutated copies of the CUDA kernels' source, each without one of the synchronizations.

For every barrier, shuffle, vote, ticket and atomic operation in ``normscope/kernels/cuda/*.cuh``,
and in the kernel by which ranks on one device exchange messages in tests, the script makes a folder
in which this operation is replaced by one that ignores other threads. In that kernel, it also
replaces what keeps the epochs of the ranks apart. The other files are copied unchanged. It prints
the names of the folders, one per line. If a test suite passes with such a copy, it does not test
the operation that was removed.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDERS = (Path("normscope/kernels/cuda"), Path("tests/comm/on_device"))

# By the name of a copy: the pattern to replace, and its replacement. Arguments only contain commas
# within brackets.
ARGUMENT = r"((?:[^(),\[\]]|\[[^\]]*\]|\([^()]*\))+)"
MUTATIONS = {
    "barrier": (r"__syncthreads\(\);", ";"),
    "shuffle_down": (rf"__shfl_down_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"\2"),
    "shuffle_xor": (rf"__shfl_xor_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"\2"),
    "shuffle": (rf"__shfl_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"\2"),
    "vote": (rf"__any_sync\({ARGUMENT}, {ARGUMENT}\)", r"(\2)"),
    "ticket": (
        rf"(?<== )take_ticket\({ARGUMENT}, {ARGUMENT}\)",
        r"(*(\1) == (\2) ? (*(\1) = 0, (\2)) : (*(\1))++)",
    ),
    "atomic": (rf"atomicAdd\({ARGUMENT}, {ARGUMENT}\);", r"*(\1) += \2;"),
    "release": (
        r"announce\((shared\.announced[^,]*), ([^,]*)\);",
        r"std::atomic_ref(*(\1)).store(\2, std::memory_order_relaxed);",
    ),
    "acquire": (
        r"look_at\((shared\.announced[^)]*)\)",
        r"std::atomic_ref(*(\1)).load(std::memory_order_relaxed)",
    ),
    "epochs": (r"shared\.announced\[rank\] \+ 1;", "1;"),
    "turns": (r"epoch % SharedSlots::kSlots\b", "epoch * 0"),
}


def mutants(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, line and text of every mutated copy."""
    for kind, (pattern, replacement) in MUTATIONS.items():
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            mutated = text[: match.start()] + match.expand(replacement) + text[match.end() :]
            yield kind, line, mutated


def calls(text: str) -> int:
    """Return the number of calls to replace."""
    names = (
        r"__syncthreads|__shfl\w*|__any_sync|__ballot\w*|__syncwarp|atomic[A-Z]\w*|__threadfence\w*"
    )
    epochs = r"\bkSlots\b|(?:announce\(|look_at\()?shared\.announced\b"
    return len(re.findall(rf"(?:\b(?:{names})|(?<== )take_ticket)\(|{epochs}", text))


def main(arguments: Sequence[str]) -> int:
    """Write the copies and print the names of their folders; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the root of the tree that is copied from")
    parser.add_argument("into", type=Path, help="an empty folder, or one of an earlier run")
    options = parser.parse_args(arguments)

    shutil.rmtree(options.into, ignore_errors=True)
    paths = [path for of in FOLDERS for path in sorted((options.source / of).glob("*.cuh"))]
    for path in paths:
        text = path.read_text()
        found = list(mutants(text))
        if len(found) != calls(text):
            print(f"{path}: {calls(text)} calls, but {len(found)} mutations of them")
            return 1
        for kind, line, mutated in found:
            name = f"{path.stem}_line_{line}_without_{kind}"
            folder = options.into / name / path.parent.relative_to(options.source)
            shutil.copytree(path.parent, folder)
            (folder / path.name).write_text(mutated)
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
