#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile the CUDA kernels, and hold what each of them takes against the limits beside it.

Above every kernel in the folder's .cuh files stands a line

    // Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.

and every instance of the kernel, for every architecture, must keep to it. More registers than
the limit keep threads off a multiprocessor; fewer than the least say that the compiler has dropped
work, as it does where code has no defined meaning. A line that ends in

    0 shared; no float64.

says that instances for other elements than float64 have no instruction of that type, since most
devices execute one for every 64 of float32.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

SKIPPED = 77  # what ctest is told to take for a skipped test


class Limits(NamedTuple):
    """What the instances of a kernel may take."""

    fewest_registers: int
    most_registers: int
    stack: int  # bytes a thread
    spilled: int  # bytes a thread
    shared: int  # bytes a block
    float64: bool  # whether instances for other elements may compute in it


class Instance(NamedTuple):
    """What one instance of a kernel takes."""

    symbol: str
    registers: int
    stack: int  # bytes a thread
    spilled: int  # bytes a thread, stored and loaded
    shared: int  # bytes a block
    float64: int  # instructions

    @property
    def is_for_float64(self) -> bool:
        """Whether its elements are."""
        return "IdE" in self.symbol


def read_limits(folder: Path) -> dict[str, Limits]:
    """Return each kernel's limits by its name; a kernel that has none is an error."""
    pattern = re.compile(
        r"(?:// Limits: (\d+) to (\d+) registers; "
        r"bytes: (\d+) stack, (\d+) spilled, (\d+) shared(; no float64)?\.\n)?"
        r"(?:template <.*>\n)?"
        r"__global__ void\s+(?:__launch_bounds__\(\w+\)\s+)?(\w+)\("
    )
    limits = {}
    for path in sorted(folder.glob("*.cuh")):
        for *numbers, no_float64, name in pattern.findall(path.read_text()):
            if "" in numbers:
                raise SystemExit(f"{path}: {name}: expected a line of limits above it, got none")
            fewest, most, stack, spilled, shared = map(int, numbers)
            limits[name] = Limits(fewest, most, stack, spilled, shared, not no_float64)
    return limits


def float64_instructions(ptx: str) -> dict[str, int]:
    """Return how many each kernel has, by its symbol."""
    bodies = (part.split("(", 1) for part in ptx.split(".entry ")[1:])
    # Registers are declared with a type, too.
    return {
        symbol.strip(): sum(
            ".f64" in line and not line.lstrip().startswith(".reg") for line in body.splitlines()
        )
        for symbol, body in bodies
    }


def instances(report: str, ptx: str) -> Iterator[Instance]:
    """Yield what ptxas -v and the assembly say about each kernel."""
    float64 = float64_instructions(ptx)
    for part in report.split("Compiling entry function '")[1:]:

        def number(pattern: str, text: str = part) -> int:
            return sum(int(value) for value in re.findall(pattern, text))

        symbol = part[: part.index("'")]
        yield Instance(
            symbol=symbol,
            registers=number(r"Used (\d+) registers"),
            stack=number(r"(\d+) bytes stack frame"),
            spilled=number(r"(\d+) bytes spill"),
            shared=number(r"(\d+) bytes smem"),
            float64=float64[symbol],
        )


def kernel_of(symbol: str, names: Sequence[str]) -> str:
    """Return the kernel's name in a mangled symbol, where its length stands before it."""
    return next(name for name in names if f"{len(name)}{name}" in symbol)


def complaints(instance: Instance, limits: Limits) -> Iterator[str]:
    """Yield in what an instance exceeds its limits."""
    if not limits.fewest_registers <= instance.registers <= limits.most_registers:
        expected = f"{limits.fewest_registers} to {limits.most_registers}"
        yield f"expected {expected} registers, got {instance.registers}"
    for what in ("stack", "spilled", "shared"):
        got, most = getattr(instance, what), getattr(limits, what)
        if got > most:
            yield f"expected at most {most} bytes {what}, got {got}"
    if instance.float64 and not (limits.float64 or instance.is_for_float64):
        yield f"expected no float64 instructions, got {instance.float64}"


def main(arguments: Sequence[str]) -> int:
    """Compile, print what each kernel takes at most, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the .cuh files are")
    parser.add_argument("compile", nargs="+", help="nvcc and its arguments")
    options = parser.parse_args(arguments)
    if options.compile[0].endswith("-NOTFOUND"):
        print("cuda: nvcc is missing, so that no kernel is compiled")
        return SKIPPED

    limits = read_limits(options.folder)
    with tempfile.TemporaryDirectory() as kept:
        result = subprocess.run(
            [*options.compile, "-Xptxas", "-v", "--keep", "--keep-dir", kept],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if result.returncode:
            print(result.stderr)
            return 1
        ptx = "".join(path.read_text() for path in Path(kept).glob("*.ptx"))
    found: dict[str, list[Instance]] = {name: [] for name in limits}
    status = 0
    for instance in instances(result.stderr, ptx):
        name = kernel_of(instance.symbol, list(limits))
        found[name].append(instance)
        for complaint in complaints(instance, limits[name]):
            print(f"{instance.symbol}: {complaint}")
            status = 1
    for name, all_of_it in found.items():
        if not all_of_it:
            print(f"{name}: expected an instance, got none")
            return 1
        registers = [instance.registers for instance in all_of_it]
        stack, spilled, shared = (
            max(getattr(instance, what) for instance in all_of_it)
            for what in ("stack", "spilled", "shared")
        )
        print(
            f"{name}: {len(all_of_it)} instances, {min(registers)} to {max(registers)} registers; "
            f"bytes: {stack} stack, {spilled} spilled, {shared} shared; float64 instructions: "
            f"{max((i.float64 for i in all_of_it if not i.is_for_float64), default=0)}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
