#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile the CUDA kernels, and check their resource usage against the limits in the source.

In the .cuh files of the folder, each kernel has a line above it like

    // Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.

Every instance of the kernel has to stay within these limits on every architecture. Too many
registers reduce the number of threads on a multiprocessor. Too few registers indicate that the
compiler has removed code, as it may do with undefined behaviour. A line that ends with

    0 shared; no float64.

requires that only instances for float64 elements have float64 instructions: most devices execute
one of them in the time of 64 float32 instructions. The limits of loops are checked too
(kernel_loops.py).
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kernel_loops import check_loops, is_in


class Limits(NamedTuple):
    """Resources that the instances of a kernel may use."""

    fewest_registers: int
    most_registers: int
    stack: int  # bytes per thread
    spilled: int  # bytes per thread
    shared: int  # bytes per block
    float64: bool  # whether instances for other elements may have float64 instructions


class Instance(NamedTuple):
    """Resources that one instance of a kernel uses."""

    symbol: str
    registers: int
    stack: int  # bytes per thread
    spilled: int  # bytes per thread, stored and loaded
    shared: int  # bytes per block
    float64: int  # number of instructions

    @property
    def is_for_float64(self) -> bool:
        """Whether the elements are float64."""
        return "IdE" in self.symbol


def read_limits(folder: Path) -> dict[str, Limits]:
    """Return the limits of each kernel by name; a kernel without limits is an error."""
    pattern = re.compile(
        r"(?:// Limits: (\d+) to (\d+) registers; "
        r"bytes: (\d+) stack, (\d+) spilled, (\d+) shared(; no float64)?\.\n)?"
        r"(?:// Loop: .*\n)?(?:template <.*>\n)?"
        r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\("
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
    """Return the number of float64 instructions of each kernel, by symbol."""
    bodies = (part.split("(", 1) for part in ptx.split(".entry ")[1:])
    # Declarations of registers have a type too; they are not instructions.
    return {
        symbol.strip(): sum(
            ".f64" in line and not line.lstrip().startswith(".reg") for line in body.splitlines()
        )
        for symbol, body in bodies
    }


def instances(report: str, ptx: str) -> Iterator[Instance]:
    """Yield the resources of each kernel from the output of ptxas -v and the assembly."""
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
    """Return the kernel's name from a mangled symbol, which contains its length before it."""
    return next(name for name in names if is_in(name, symbol))


def complaints(instance: Instance, limits: Limits) -> Iterator[str]:
    """Yield a line for each limit that an instance exceeds."""
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
    parser.add_argument("--nvdisasm", required=True, help="the program that reads machine code")
    parser.add_argument("folder", type=Path, help="where the .cuh files are")
    parser.add_argument("compile", nargs="+", help="nvcc and its arguments")
    options = parser.parse_args(arguments)
    if options.nvdisasm.endswith("-NOTFOUND"):
        print("cuda: nvdisasm is missing, no loop is checked: pip install --group nvdisasm")
        return 1

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
        cubins = sorted(Path(kept).glob("*.cubin"))
        status = check_loops(cubins, options.folder, options.nvdisasm)
    found: dict[str, list[Instance]] = {name: [] for name in limits}
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
