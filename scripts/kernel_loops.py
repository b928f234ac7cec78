# SPDX-License-Identifier: Apache-2.0
"""Find the loops in the machine code of CUDA kernels, and compare them with limits in the source.

A limit is a sentence above a kernel, or above a template argument of kernels:

    // Loop: at most 60 instructions per store; at least 4 loads.
    // Loop: at most 150 instructions per store, 550 with Silu; at most 160 float64 instructions.
    // Loop: at most 80 instructions per store; at least 8 loads; at least 8 before the wait.
    // Loop: at least 8 loads; at least 12 before the first shuffle.

Of each instance for packs of bfloat16, and of sums of float32 too, it describes the loop in which
the instance spends its time. Loads are those that are in flight when the first loaded number is
needed. Those before the wait are executed before the kernel waits for the previous one, those
before the first shuffle before its threads first exchange numbers. Kernels that sum and apply have
a loop for each, and wait for no other kernel.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# In the names of instances for packs; then those of bfloat16, and of sums of float32.
PACKS = "6AccessE0E"
DESCRIBED = ("8BFloat16", "TermsIfE")

# In the names of instances that sum.
SUMS = "AfterSums"

# Of the wait for the previous kernel, and of the exchange of numbers between threads of a warp.
INSTRUCTIONS = {"wait": "ACQBULK", "first shuffle": "SHFL"}


class Loop(NamedTuple):
    """What a loop has."""

    instructions: int
    stores: int
    float64: int
    loads: int


class LoopLimits(NamedTuple):
    """Limits of the loops of some instances; None: no limit."""

    name: str  # of the kernel, or of its template argument
    instructions: int | None
    with_name: Mapping[str, int]  # instead of `instructions`, for template arguments with a name
    float64: int | None
    loads: int | None
    loads_before: Mapping[str, int]  # by what they come before: a key of INSTRUCTIONS


def is_in(name: str, symbol: str) -> bool:
    """Return whether a mangled symbol contains the name, which has its length before it."""
    return f"{len(name)}{name}" in symbol


def read_loop_limits(folder: Path) -> list[LoopLimits]:
    """Return the limits of loops in the .cuh files of the folder."""
    pattern = re.compile(
        r"// Loop: ((?:.|\n// )*?)\.\n(?:// .*\n)*(?:template <.*>\n)"
        r"(?:struct|__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?) ?(\w+)"
    )

    def number(pattern: str, text: str) -> int | None:
        found = re.search(pattern, text)
        return int(found[1]) if found else None

    limits = []
    for path in sorted(folder.glob("*.cuh")):
        found = [
            (text.replace("\n// ", " "), name) for text, name in pattern.findall(path.read_text())
        ]
        if len(found) != path.read_text().count("// Loop: "):
            raise SystemExit(f"{path}: expected a kernel or struct below each line of loop limits")
        limits += [
            LoopLimits(
                name=name,
                instructions=number(r"at most (\d+) instructions", text),
                with_name={b: int(a) for a, b in re.findall(r"(\d+) with (\w+)", text)},
                float64=number(r"at most (\d+) float64 instructions", text),
                loads=number(r"at least (\d+) loads", text),
                loads_before={
                    what: int(least)
                    for least, what in re.findall(r"at least (\d+) before the ([a-z ]+)", text)
                },
            )
            for text, name in found
        ]
    return limits


def loads_in_flight(body: list[str]) -> int:
    """Return the number of loads before the first instruction that needs one of them."""
    pending: set[int] = set()
    loads = 0
    for instruction in body:
        registers = [int(register) for register in re.findall(r"\bR(\d+)", instruction)]
        is_store = re.search(r"\b(STG|STS|RED)", instruction)
        if pending.intersection(registers if is_store else registers[1:]):
            break
        load = re.search(r"\bLDG\S*?(\.64|\.128|) ", instruction)
        if load and registers:
            loads += 1
            words = {".64": 2, ".128": 4}.get(load[1], 1)
            pending.update(range(registers[0], registers[0] + words))
    return loads


def loads_before(instruction: str, code: str) -> int:
    """Return the number of loads in front of the first such instruction."""
    before, found, _ = code.partition(instruction)
    return len(re.findall(r"\bLDG", before)) if found else 0


def loops_of(code: str) -> Iterator[Loop]:
    """Yield the loops that load, without those around them, from the code of a kernel."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            instructions.append(found[1])
    ranges = set()
    for i, branch in enumerate(instructions):
        target = re.search(r"\bBRA.*`\((\.L_\w+)\)", branch)
        if target and labels.get(target[1], len(instructions)) <= i:
            ranges.add((labels[target[1]], i + 1))

    def count(begin: int, end: int, pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in instructions[begin:end])

    loading = [at for at in ranges if count(*at, r"\bLDG")]
    for begin, end in loading:
        if any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loading):
            continue
        yield Loop(
            instructions=end - begin,
            stores=count(begin, end, r"\bSTG"),
            float64=count(begin, end, r"\bD(ADD|MUL|FMA|SETP)\b|\.F64\b"),
            loads=loads_in_flight(instructions[begin:end]),
        )


def main_loops(code: str, limits: LoopLimits) -> list[Loop]:
    """Return the loops that the limits are for.

    If the instructions per store are limited, they store, and have the most loads in flight. If
    float64 instructions are, they have the most of those. Others, of sums in the type of the
    elements, do neither, and have the most loads. What exchanges or finalizes sums has loops too.
    """
    loops = [loop for loop in loops_of(code) if bool(loop.stores) == bool(limits.instructions)]
    if limits.float64 is not None:
        most = max((loop.float64 for loop in loops), default=0)
        return [loop for loop in loops if loop.float64 == most]
    loops = [loop for loop in loops if not loop.float64]
    most = max((loop.loads for loop in loops), default=0)
    return [loop for loop in loops if loop.loads == most]


def machine_code(cubin: Path, nvdisasm: str) -> dict[str, str]:
    """Return the machine code of each kernel by symbol; none if it is not for sm_90."""
    text = subprocess.run(
        [nvdisasm, "-c", cubin], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    if not re.search(r"\.target\s+sm_90\b", text):
        return {}
    parts = re.split(r"\n\s*\.section\s+\.text\.", text)[1:]
    return {part[: part.index(",")].strip('"'): part for part in parts}


def loop_complaints(symbol: str, code: str, limits: LoopLimits) -> Iterator[str]:
    """Yield a line for each limit that a loop of an instance exceeds."""
    loops = main_loops(code, limits)
    if not loops:
        yield "expected a loop, got none"
    of_names = (most for name, most in limits.with_name.items() if is_in(name, symbol))
    most = next(of_names, limits.instructions)
    for loop in loops:
        if most is not None and loop.instructions > most * loop.stores:
            yield (
                f"expected at most {most} instructions per store in the loop, "
                f"got {loop.instructions} for {loop.stores}"
            )
        if limits.float64 is not None and loop.float64 > limits.float64:
            yield f"expected at most {limits.float64} float64 in the loop, got {loop.float64}"
        if limits.loads is not None and loop.loads < limits.loads:
            yield f"expected at least {limits.loads} loads in flight, got {loop.loads}"
    for what, least in limits.loads_before.items():
        if what == "wait" and SUMS in symbol:
            continue
        if (loads := loads_before(INSTRUCTIONS[what], code)) < least:
            yield f"expected at least {least} loads before the {what}, got {loads}"


def check_loops(cubins: list[Path], folder: Path, nvdisasm: str) -> int:
    """Print what the limited loops have, and what exceeds limits; return the exit status."""
    codes: dict[str, str] = {}
    for cubin in cubins:
        codes |= machine_code(cubin, nvdisasm)
    status = 0
    for limits in read_loop_limits(folder):
        found: list[Loop] = []
        for symbol, code in codes.items():
            is_described = PACKS in symbol and any(part in symbol for part in DESCRIBED)
            if not is_in(limits.name, symbol) or not is_described:
                continue
            for complaint in loop_complaints(symbol, code, limits):
                print(f"{symbol}: {complaint}")
                status = 1
            found += main_loops(code, limits)
        if not found:
            print(f"{limits.name}: expected code for sm_90, got none")
            return 1
        print(
            f"{limits.name}: loops of {min(loop.loads for loop in found)} or more loads; at most "
            f"{max(loop.instructions / max(loop.stores, 1) for loop in found):.0f} instructions "
            f"per store or turn, {max(loop.float64 for loop in found)} float64 instructions"
        )
    return status
