# SPDX-License-Identifier: Apache-2.0
"""Prints the speed of normscope's layers in training, relative to torch's layers and to a copy.

Measures forward and backward of the modules with autograd and newly allocated outputs. The two
sides of a ratio run alternately in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from time import monotonic

import torch

import comparisons
from cases import ARRANGEMENTS, SMALLEST, Arrangement, all_cases, few_cases
from comparisons import Comparison
from ranks import Plan, Result, measure
from table import COMPARISON_HEADER, comparison_row, header

ROUNDS = 9
QUICK_ROUNDS = 5

LEGEND = """\
ms       normscope's layer, median of {rounds} rounds, outputs freshly allocated
ratio    torch.nn's time divided by normscope's: above 1, normscope is faster; quartiles over the
         rounds. Under world torch.nn still normalizes each rank alone, and has no exchange to make
copies   normscope's time in copies of the input into memory that is in use already
alone    the kernels without torch, into such memory, in the same copies: as fast as memory is 1
         forward and 1.5 backward
local    normscope's time divided by that of its layer with scope local, in as many processes
ranks    have an input of this shape each, and one thread; figures are means over them"""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure a few shapes, in fewer rounds"
    )
    parser.add_argument("--json", type=Path, help="also write every figure to FILE", metavar="FILE")
    parser.add_argument("--plot", type=Path, help="also draw the ratios into FILE", metavar="FILE")
    parser.add_argument(
        "--kernels", type=Path, help="the compiled kernels.cpp; the kernels are left out without it"
    )
    return parser.parse_args()


def describe_machine() -> str:
    """Return the processor, and what normscope prints about this installation."""
    installation = subprocess.run(
        [sys.executable, "-m", "normscope"], capture_output=True, text=True, check=True
    ).stdout.rstrip()
    cores = len(os.sched_getaffinity(0))
    return f"machine        {_processor()}, {cores} cores, {platform.platform()}\n{installation}"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def busy_seconds() -> float:
    """Return the processor time of all programs since the machine started."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[1:9]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the processor time of this process and of its children."""
    return sum(os.times()[:4])


def print_section(arrangement: Arrangement) -> None:
    """Print the head of one table."""
    print(f"\n{arrangement}\n{header(arrangement.scope)}", flush=True)


def slower_than_torch(results: list[Result]) -> list[str]:
    """Return a line for each direction of each result that is slower than torch's layer."""
    return [
        f"  {result.arrangement}: {result.case} {name} {direction.ratio}"
        + (", within the spread" if direction.ratio.upper >= 1 else "")
        for result in results
        for name, direction in (
            ("forward", result.timing.forward),
            ("backward", result.timing.backward),
        )
        if direction.ratio.median < 1
    ]


def summary(results: list[Result]) -> list[str]:
    """Return the geometric mean and smallest ratio of each arrangement and dtype.

    The smallest input, which measures the cost of a call, is left out.
    """
    lines = []
    for arrangement in ARRANGEMENTS:
        for dtype in ("float32", "bfloat16"):
            timings = [
                result.timing
                for result in results
                if result.arrangement == arrangement
                and result.case.dtype == dtype
                and result.case.shape != SMALLEST
            ]
            forward = [timing.forward.ratio.median for timing in timings]
            backward = [timing.backward.ratio.median for timing in timings]
            means = _means(forward, backward, "least", min)
            lines.append(f"{arrangement!s:28}{dtype:10}{means}")
    return lines


def summary_of_local(results: list[Result]) -> list[str]:
    """Return the time relative to scope local for each arrangement of several ranks."""
    lines = []
    for arrangement in ARRANGEMENTS:
        timings = [result.timing for result in results if result.arrangement == arrangement]
        forward = [one.forward.of_local.median for one in timings if one.forward.of_local]
        backward = [one.backward.of_local.median for one in timings if one.backward.of_local]
        if forward:
            lines.append(f"{arrangement!s:28}{_means(forward, backward, 'most', max)}")
    return lines


def _means(
    forward: list[float],
    backward: list[float],
    name: str,
    extreme: Callable[[list[float]], float],
) -> str:
    return "   ".join(
        f"{direction} {geometric_mean(ratios):.2f} ({name} {extreme(ratios):.2f})"
        for direction, ratios in (("forward", forward), ("backward", backward))
    )


def print_comparisons(title: str, made: Iterable[Comparison]) -> list[Comparison]:
    """Print a table of comparisons, each as soon as it is made."""
    print(f"\n{title}\n{COMPARISON_HEADER}", flush=True)
    kept = []
    for one in made:
        kept.append(one)
        print(comparison_row(one.case, one.name, one.forward, one.backward), flush=True)
    return kept


def compare() -> tuple[list[Comparison], dict[str, float], dict[str, float]]:
    """Run all other comparisons."""
    torch.set_num_threads(comparisons.THREADS)
    missing = [
        name
        for name, is_there in (("oneDNN", comparisons.has_onednn()), ("jax", comparisons.has_xla()))
        if not is_there
    ]
    made = print_comparisons("slices, 2 threads", comparisons.compare_slices())
    made += print_comparisons("eval, 2 threads", comparisons.compare_eval())
    made += print_comparisons(
        "others, 2 threads: their time / that of normscope's better layout"
        + (f" (left out, not installed: {', '.join(missing)})" if missing else ""),
        comparisons.compare_peers(),
    )
    memory = comparisons.peak_memory()
    shape = "x".join(map(str, comparisons.MEMORY_SHAPE))
    print(f"\npeak memory of a training step, {shape} float32, without input and its gradient")
    kept = comparisons.statistics_kept()
    for name, mebibytes in memory.items():
        print(f"{name:12}{mebibytes:7.1f} MiB, statistics of {kept[name]:.0f} bytes per channel")
    print()
    return made, memory, kept


def save(
    path: Path,
    machine: str,
    results: list[Result],
    compared: list[Comparison],
    memory: dict[str, float],
    kept: dict[str, float],
) -> None:
    """Write every figure as JSON."""
    content = {
        "command": "make bench",
        "machine": machine.splitlines(),
        "results": [asdict(result) for result in results],
        "comparisons": [asdict(one) for one in compared],
        "peak_memory_mebibytes": memory,
        "statistics_bytes_a_channel": kept,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Measure what the command line asks for."""
    arguments = parse_arguments()
    cases, rounds = (few_cases(), QUICK_ROUNDS) if arguments.quick else (all_cases(), ROUNDS)
    machine, start = describe_machine(), monotonic()
    others_before = busy_seconds() - own_seconds()
    print(f"{machine}\n\n{LEGEND.format(rounds=rounds)}")

    results = []
    for arrangement in ARRANGEMENTS:
        print_section(arrangement)
        results += measure(Plan(arrangement, cases, rounds, arguments.kernels))
    compared, memory, kept = compare()

    slower = slower_than_torch(results)
    print(f"{len(slower)} of {2 * len(results)} ratios to torch.nn are below 1", *slower, sep="\n")
    print("\nratios to torch.nn, in the geometric mean", *summary(results), sep="\n")
    print("\ntime divided by that of scope local", *summary_of_local(results), sep="\n")
    seconds, others = monotonic() - start, busy_seconds() - own_seconds() - others_before
    print(f"Measured in {seconds:.0f} s, of which other programs kept a core for {others:.0f} s")
    if arguments.json is not None:
        save(arguments.json, machine, results, compared, memory, kept)
    if arguments.plot is not None:
        from plot import draw

        draw(arguments.plot, results)


if __name__ == "__main__":
    main()
