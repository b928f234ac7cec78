#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a copy of the CUDA kernels' source in which each synchronization can be left out.

For every barrier of a block or a cluster, shuffle, vote, ticket, atomic operation, and announcement
to other ranks in ``normscope/kernels/cuda/*.cuh``, the copy has a mutant: an operation in its place
that ignores other threads. Mutants of a wait for the earlier kernel leave it out, or wait behind
the next statement; those of what lets the next kernel start leave it out. In the exchange between
ranks, there are also mutants of what keeps its epochs apart. Other mutants are wrong about the
elements before and after the packs of a plane: they leave them out, give them to other lanes, or
take packs from tensors in which those start at other elements. A program that is compiled from the
copy runs the mutant whose number the environment variable ``NORMSCOPE_MUTANT`` has, if it
has one. The script prints the names of the mutants in the order of their numbers, from 1, one per
line. If a test suite passes with a mutant, it does not test the operation that was left out.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("normscope/kernels/cuda")

# By the name of a mutant: the pattern of what it replaces, and the mutant. Both are expressions of
# one type, or the mutant is what takes the place of the statements, with its NUMBER. Arguments only
# contain commas within brackets.
ARGUMENT = r"((?:[^(),\[\]]|\[[^\]]*\]|\([^()]*\))+)"
MUTATIONS = {
    "barrier": (r"__syncthreads\(\)", "void()"),
    "cluster": (r"(?<!::)\bmeet_in_cluster\(\)(?=;)", "void()"),
    "shuffle_down": (rf"__shfl_down_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"\2"),
    "shuffle_xor": (rf"__shfl_xor_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"(\2)"),
    "shuffle": (rf"__shfl_sync\({ARGUMENT}, {ARGUMENT}, {ARGUMENT}, {ARGUMENT}\)", r"\2"),
    "vote": (rf"__any_sync\({ARGUMENT}, {ARGUMENT}\)", r"(\2)"),
    "block_vote": (rf"__syncthreads_or\({ARGUMENT}\)", r"(\1)"),
    "ticket": (
        rf"(?<== )take_ticket\({ARGUMENT}, {ARGUMENT}\)",
        r"(*(\1) == (\2) ? (*(\1) = 0, (\2)) : (*(\1))++)",
    ),
    "atomic": (rf"atomicAdd\({ARGUMENT}, {ARGUMENT}\)(?=;)", r"void(*(\1) += \2)"),
    "release": (
        r"announce\((announced\([^()]*\)), (epoch)\)(?=;)",
        r"std::atomic_ref(*(\1)).store(\2, std::memory_order_relaxed)",
    ),
    "acquire": (
        r"look_at\((word)\)(?= >= epoch)",
        r"std::atomic_ref(*(\1)).load(std::memory_order_relaxed)",
    ),
    "wait": (r"(?<=Apply>\) )wait_for_earlier_kernel\(\)(?=;)", "void()"),
    "order": (
        r"(?m)^( *(?:if \(kWaits\) )?)wait_for_earlier_kernel\(\);\n(.*;)$",
        r"\1if (kMutant != NUMBER) wait_for_earlier_kernel();\n"
        r"\2\n"
        r"\1if (kMutant == NUMBER) wait_for_earlier_kernel();",
    ),
    "start": (r"(?<!::)\blet_next_kernel_start\(\)(?=;)", "void()"),
    "epochs": (r"\*announced\([^()]*\) \+ 1(?=;)", "std::uint64_t{1}"),
    "advance": (r"\*announced\([^()]*\) = epoch(?=;)", r"if (kMutant != NUMBER) \g<0>"),
    "turns": (r"epoch % PeerMemory::kSlots\b", "epoch * 0"),
}

# The same for elements before and after packs, in kernels and in what the host decides. There is at
# least one of each.
PLACES = {
    "head": (r"lane < head \? lane : (packs \* kPack \+ lane)", r"\1"),
    "tail": (r"(?<=&& )own < positions\b", "own < head"),
    "part": (r"\badd_part\((?:[^()]|\([^()]*\))*\)(?=;)", "void()"),
    "rotation": (r"first_row - kLanes \+ lane\b", "first_row - G::kLanes - lane"),
    "address": (r"distance % static_cast<std::uintptr_t>\(bytes\) == 0", "true"),
    "stride": (r"\(x\.(?:sample|channel)_stride - other\.\w+\) % pack == 0", "true"),
}

MUTANT = """// Written by scripts/mutate_cuda_kernels.py.
#pragma once

#include <cstdlib>

inline const int kMutant = [] {
  const char* const number = std::getenv("NORMSCOPE_MUTANT");
  return number == nullptr ? 0 : std::atoi(number);
}();
"""


def mutants(text: str) -> list[tuple[re.Match[str], str, str]]:
    """Return what mutants replace, in the order of the text, with their kinds and texts."""
    found = [
        (match, kind, match.expand(mutant))
        for kind, (pattern, mutant) in (MUTATIONS | PLACES).items()
        for match in re.finditer(pattern, text)
    ]
    return sorted(found, key=lambda each: each[0].start())


def with_mutants(text: str, first: int) -> str:
    """Return the text with all its mutants, whose numbers start at ``first``."""
    parts = ['#include "mutant.h"\n']
    end = 0
    for number, (match, _, mutant) in enumerate(mutants(text), first):
        choice = f"(kMutant == {number} ? {mutant} : {match[0]})"
        if "NUMBER" in mutant:
            choice = mutant.replace("NUMBER", str(number))
        parts += [text[end : match.start()], choice]
        end = match.end()
    return "".join([*parts, text[end:]])


def calls(text: str) -> int:
    """Return the number of calls to replace."""
    names = (
        r"__syncthreads(?:_or)?|__shfl\w*|__any_sync|__ballot\w*|__syncwarp|atomic[A-Z]\w*"
        r"|__threadfence\w*"
    )
    early = r"(?<!::)\b(?:wait_for_earlier_kernel|let_next_kernel_start|meet_in_cluster)\(\);"
    epochs = r"% PeerMemory::kSlots\b|(?:announce\(|\*)announced\(|(?<!::)look_at\(word\)"
    return len(re.findall(rf"(?:\b(?:{names})|(?<== )take_ticket)\(|{epochs}|{early}", text))


def main(arguments: Sequence[str]) -> int:
    """Write the copy and print the names of its mutants; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="the root of the tree that is copied from")
    parser.add_argument("into", type=Path, help="an empty folder, or one of an earlier run")
    options = parser.parse_args(arguments)

    shutil.rmtree(options.into, ignore_errors=True)
    names: list[str] = []
    missing = set(PLACES)
    shutil.copytree(options.source / FOLDER, options.into / FOLDER)
    for path in sorted((options.into / FOLDER).glob("*.*h")):
        text = path.read_text()
        found = mutants(text)
        of_calls = sum(kind in MUTATIONS for _, kind, _ in found)
        if path.suffix == ".cuh" and of_calls != calls(text):
            print(f"{path}: {calls(text)} calls, but {of_calls} mutants of them")
            return 1
        if not found:
            continue
        missing -= {kind for _, kind, _ in found}
        path.write_text(with_mutants(text, len(names) + 1))
        for match, kind, _ in found:
            line = text.count("\n", 0, match.start()) + 1
            names.append(f"{path.stem}_line_{line}_without_{kind}")
    if missing:
        print(f"expected what these mutants replace: {', '.join(sorted(missing))}")
        return 1
    (options.into / "mutant.h").write_text(MUTANT)
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
