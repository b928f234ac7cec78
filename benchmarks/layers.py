# SPDX-License-Identifier: Apache-2.0
"""Prints how fast normscope's layers train, as ratios to torch's layers and to a copy.

Forward and backward through the modules with autograd, outputs freshly allocated. Everything that a
ratio compares ran in turn in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from cases import ARRANGEMENTS, Arrangement, all_cases, few_cases
from ranks import Result, measure
from table import HEADER

ROUNDS = 9
QUICK_ROUNDS = 5

LEGEND = """\
ms       normscope's layer, median of {rounds} rounds
x torch  torch.nn's time divided by normscope's: above 1, normscope is faster; quartiles over the
         rounds. Under world torch.nn still normalizes each rank alone, and has no exchange to make
copies   normscope's time in copies of the input into touched memory; a kernel that is as fast as
         memory takes 1 forward and 1.5 backward, not counting page faults of its fresh output
ranks    have an input of this shape each, and one thread; figures are means over them"""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="measure a few shapes, in fewer rounds"
    )
    parser.add_argument("--json", type=Path, help="also write every figure to FILE", metavar="FILE")
    return parser.parse_args()


def describe_machine() -> str:
    """The processor, and what normscope says of this installation."""
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
    """Processor time that all programs have used since the machine started."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[1:9]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor time that this process and those that it has waited for have used."""
    return sum(os.times()[:4])


def print_section(arrangement: Arrangement) -> None:
    """Print the head of one table."""
    print(f"\n{arrangement}\n{HEADER}", flush=True)


def slower_than_torch(results: list[Result]) -> list[str]:
    """A line for each direction of each result that took longer than torch's layer."""
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


def save(path: Path, machine: str, rounds: int, results: list[Result]) -> None:
    """Write every figure as JSON."""
    content = {
        "machine": machine.splitlines(),
        "rounds": rounds,
        "results": [asdict(result) for result in results],
    }
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
        results += measure(arrangement, cases, rounds)

    slower = slower_than_torch(results)
    print(
        f"\n{len(slower)} of {2 * len(results)} ratios to torch.nn are below 1", *slower, sep="\n"
    )
    seconds, others = monotonic() - start, busy_seconds() - own_seconds() - others_before
    print(f"Measured in {seconds:.0f} s, of which other programs kept a core for {others:.0f} s")
    if arguments.json is not None:
        save(arguments.json, machine, rounds, results)


if __name__ == "__main__":
    main()
