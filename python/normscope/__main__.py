# SPDX-License-Identifier: Apache-2.0
"""Print what is installed, where a job's ranks are, or what exchanges cost."""

import argparse
import io
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed

import normscope
from normscope._binding import ops
from normscope.costs import measurement


def _backends() -> list[str]:
    """Return the backends of torch.distributed that this torch was built with."""
    if not distributed.is_available():
        return []
    is_built = {
        "gloo": distributed.is_gloo_available,
        "mpi": distributed.is_mpi_available,
        "nccl": distributed.is_nccl_available,
        "ucc": distributed.is_ucc_available,
    }
    return [name for name, available in is_built.items() if available()]


def _print_installation() -> None:
    devices = _devices()
    installed = ops.installation(devices)
    print(f"normscope      {normscope.__version__}")
    print(f"torch          {torch.__version__}")
    print(f"python         {platform.python_version()}")
    print(f"kernels        {', '.join(installed.kernels)}; in use: {installed.in_use}")
    print(f"cuda           {installed.cuda}")
    for device, kernels in zip(devices, installed.of_devices, strict=True):
        print(f"{device:<14} {kernels}")
    print(f"communicators  shared memory (ranks of one host), {', '.join(_backends())}")


def _devices() -> list[str]:
    """Return the types of device at hand."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _own_processes() -> list[int]:
    """Return the ids of the processes on this host that this user may inspect."""
    return sorted(
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and os.access(folder / "fd", os.R_OK | os.X_OK)
    )


def _status_of_all() -> list[str]:
    """Return one line per distinct status over all processes that this user may inspect."""
    who: dict[str, list[str]] = {}
    where: dict[str, str] = {}
    for process in _own_processes():
        try:
            text = normscope.status(process)
        except RuntimeError:  # ended meanwhile
            continue
        for line in text.splitlines():
            name, _, place = line.partition(": ")
            key = re.sub(r"[0-9.]+ s ago", "", place)
            where.setdefault(key, place)
            who.setdefault(key, []).append(name)
    return [f"{', '.join(who[key])}: {place}" for key, place in where.items()]


def _print_status(processes: list[int]) -> None:
    """Print the status of the given processes, or of every process with ranks if none is given."""
    # Layers may have names that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if not processes:
        print("\n".join(_status_of_all()) or "no process has exchanged anything")
    for process in processes:
        try:
            text = normscope.status(process)
        except RuntimeError as error:
            sys.exit(f"status: {error}")
        print(text.rstrip() or f"process {process}: no rank of a group that has exchanged")


def _check_output(output: Path | None) -> None:
    """Raise an error, before anything is measured, if rank 0 cannot write this file."""
    names = measurement.launcher()
    if output is None or (names is not None and os.environ[names[0]] != "0"):
        return
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"--output: expected a file in a folder that exists, got {output}")


def _measure(backend: str, rounds: int, output: Path | None) -> None:
    """Measure costs on the ranks of a launch. The first rank prints them and writes the file."""
    with measurement.joined_launch(backend):
        costs = normscope.costs.measure(rounds=rounds)
        if distributed.get_rank() == 0:
            print(costs)
            if output is not None:
                costs.save(output)


def _measure_here(ranks: int | None, backend: str, rounds: int, output: Path | None) -> None:
    """Launch the command on this host."""
    if ranks is None:
        ranks = max(2, len(os.sched_getaffinity(0)))
    if ranks < 2:
        raise ValueError(f"--ranks: expected at least 2, got {ranks}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "normscope", "measure"]
    command += ["--backend", backend, "--rounds", str(rounds)]
    command += [] if output is None else ["--output", str(output)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; without one, print versions, kernels and communicators."""
    parser = argparse.ArgumentParser(prog="python -m normscope", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    status = commands.add_parser("status", help="where the ranks of a job are, even if it hangs")
    status.add_argument("process", type=int, nargs="*", help="ids; none: all of this user's ranks")
    measure = commands.add_parser(
        "measure",
        help="measure what exchanges cost, under torchrun or mpirun, or on this host alone",
    )
    measure.add_argument(
        "--output", type=Path, help="JSON file to write, for normscope.costs.predict"
    )
    measure.add_argument(
        "--ranks", type=int, help="ranks to start without a launcher (default: one per core)"
    )
    measure.add_argument("--backend", default="gloo", help="backend of torch.distributed")
    measure.add_argument(
        "--rounds",
        type=int,
        default=measurement.ROUNDS,
        help="measurements, of which the median counts",
    )
    chosen = parser.parse_args(arguments)
    if chosen.command == "status":
        _print_status(chosen.process)
    elif chosen.command == "measure":
        options = (chosen.backend, chosen.rounds, chosen.output)
        try:
            _check_output(chosen.output)
            if measurement.launcher() is None:
                _measure_here(chosen.ranks, *options)
            elif chosen.ranks is not None:
                raise ValueError(
                    "--ranks: expected none under a launcher, which chose the ranks, got "
                    f"{chosen.ranks}"
                )
            else:
                _measure(*options)
        except ValueError as error:
            sys.exit(f"measure: {error}")
    else:
        _print_installation()


if __name__ == "__main__":
    main()
