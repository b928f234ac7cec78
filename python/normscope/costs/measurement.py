# SPDX-License-Identifier: Apache-2.0
"""Measures what exchanges cost between the ranks of the default process group."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import distributed

from normscope._binding import ops
from normscope._binding.groups import gather
from normscope.costs.model import TERMS, Costs, Terms, call_terms
from normscope.training.counters import communication_counters

# Approximate bytes of the messages, for 12 to 13 000 channels. The last ones are longer than a slot
# of shared memory.
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
ROUNDS = 15

# The approximate length of a sample: in a shorter one the scheduler would dominate.
_SAMPLE_SECONDS = 3e-3
_MOST_CALLS = 200
_CALLS_BEFORE = 3

_BYTES_PER_NUMBER = 8
_HEADER_NUMBERS = 4

# A group reads these at its first exchange.
_ALONE = {"NORMSCOPE_SHARED_MEMORY": "0", "NORMSCOPE_FORCE_SYNC": "1"}
_ON_HOST = {"NORMSCOPE_SHARED_MEMORY": "1"}
_OVER_BACKEND = {"NORMSCOPE_SHARED_MEMORY": "0"}

# Environment variables for the rank, the number of ranks, and the number of ranks on this host:
# of torchrun, Open MPI, MPICH and Intel MPI, and Slurm.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
)


class TimedExchange(NamedTuple):
    """Number of ranks of an exchange, bytes of its message, and seconds that it took."""

    ranks: int
    size: int
    seconds: float


def measure(*, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Costs:
    """Measure the parameters of docs/scaling.md among the ranks of the default process group.

    All ranks call it together, as ``python -m normscope measure`` does. It times exchanges through
    shared memory among two of the ranks of the host with the most ranks, four, and so on up to all;
    exchanges over the backend among one rank of each of two hosts, four, and so on up to all; and
    exchanges of a rank with itself over the backend. All hosts are assumed to be alike.

    Args:
        sizes: Approximate bytes of the messages; at least two different sizes.
        rounds: Number of times that each size is timed; the median is used.

    Returns:
        The costs, the same on all ranks.

    Raises:
        ValueError: If there is no default process group, if it has no CPU backend, or if an
            argument is out of range.
    """
    group = distributed.group.WORLD if distributed.is_available() else None
    if group is None:
        raise ValueError("measure: expected a default process group, got none")
    if "cpu" not in {device.type for device in group._device_types}:
        raise ValueError(
            "measure: expected a process group with a CPU backend, such as gloo, got "
            f"{distributed.get_backend()}"
        )
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise ValueError(
            f"sizes: expected two or more different sizes of at least 1 byte, got {sizes}"
        )
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(gather(ops.settings().host)):
        by_host.setdefault(host, []).append(rank)
    fullest = max(by_host.values(), key=len)
    leaders = [ranks[0] for ranks in by_host.values()]
    times = {
        "call": _times([[0]], _ALONE, sizes, rounds),
        "shared_memory": _times(beginnings(fullest), _ON_HOST, sizes, rounds),
        "message": _times(beginnings(leaders), _OVER_BACKEND, sizes, rounds),
    }
    costs = costs_of(times, f"measured, {distributed.get_backend()}")
    # On different processors, the fit of the same times can give different bits.
    return gather(costs)[0]


def costs_of(times: Mapping[str, Sequence[TimedExchange]], source: str = "") -> Costs:
    """Fit the parameters of the model to times of exchanges.

    The times for ``call`` are those of a rank with itself over the backend; for ``shared_memory``,
    of ranks of a host; for ``message``, over the backend of one rank on each host. Parameters
    without times stay unknown.
    """
    found: dict[str, Terms] = {}
    deviations: dict[str, float] = {}
    for level, terms_of in TERMS.items():
        if times[level]:
            call = found["call"] if level == "message" else (0.0, 0.0)
            found[level], deviations[level] = fit(times[level], terms_of, call)
    return Costs(**found, source=source, deviations=deviations)


def fit(
    times: Sequence[TimedExchange], terms_of: Callable[[int, int], Terms], call: Terms
) -> tuple[Terms, float]:
    """Return the two numbers, not negative, with the least squares of relative deviations.

    ``terms_of`` returns their factors for bytes and ranks. ``call`` has the numbers of the
    backend's call, which the times include. The largest deviation is returned too.
    """
    relative = []
    for ranks, size, seconds in times:
        (x, y), (calls, copied) = terms_of(size, ranks), call_terms(size)
        rest = seconds - calls * call[0] - copied * call[1]
        relative.append((x / seconds, y / seconds, rest / seconds))
    xx, xy, yy, xz, yz = (
        math.fsum(row[i] * row[j] for row in relative)
        for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    found = [(max(0.0, xz / xx), 0.0), (0.0, max(0.0, yz / yy))]
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:  # otherwise all messages have the same length
        both = (yy * xz - xy * yz) / determinant, (xx * yz - xy * xz) / determinant
        if min(both) >= 0:
            found = [both]

    def deviations(latency: float, per_byte: float) -> list[float]:
        return [abs(latency * x + per_byte * y - z) for x, y, z in relative]

    best = min(found, key=lambda numbers: math.hypot(*deviations(*numbers)))
    return best, max(deviations(*best))


def beginnings(ranks: list[int]) -> list[list[int]]:
    """Return the first two, four, eight and so on of the ranks, and all; nothing for one rank."""
    numbers = {1 << i for i in range(1, len(ranks).bit_length())} | {len(ranks)}
    return [ranks[:number] for number in sorted(numbers) if 1 < number <= len(ranks)]


def _times(
    groups: list[list[int]], environment: dict[str, str], sizes: Sequence[int], rounds: int
) -> list[TimedExchange]:
    """Measure the median times of the exchanges of groups; every rank returns them."""
    times = []
    for ranks in groups:
        group = distributed.new_group(ranks)
        medians: dict[int, float] = {}
        if distributed.get_rank() in ranks:
            with _environment(environment):
                medians = _median_times(group.group_name, len(ranks), sizes, rounds)
        of_ranks = [found for found in gather(medians) if found]
        if distributed.get_rank() in ranks:
            distributed.destroy_process_group(group)
        times += [
            TimedExchange(len(ranks), size, statistics.fmean(found[size] for found in of_ranks))
            for size in of_ranks[0]
        ]
    return times


def _median_times(group: str, ranks: int, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """Return this rank's median seconds of an exchange, by the bytes of the message."""
    own = [
        torch.ones(
            max(1, round(size / _BYTES_PER_NUMBER / ranks)), dtype=torch.float64, device="cpu"
        )
        for size in sorted(set(sizes))
    ]
    calls = []
    for numbers in own:
        # The group is made, and memory is touched for the first time.
        _seconds_of_exchange(group, numbers, _CALLS_BEFORE)
        estimate = _seconds_of_exchange(group, numbers, _CALLS_BEFORE)
        slowest = max(ops.gather_numbers([estimate], group, "measure, calls"))[0]
        calls.append(min(_MOST_CALLS, max(1, math.ceil(_SAMPLE_SECONDS / slowest))))
    samples: list[list[float]] = [[] for _ in own]
    for _ in range(rounds):
        for i, numbers in enumerate(own):
            samples[i].append(_seconds_of_exchange(group, numbers, calls[i]))
    return {
        (ranks * len(numbers) + _HEADER_NUMBERS) * _BYTES_PER_NUMBER: statistics.median(of_size)
        for numbers, of_size in zip(own, samples, strict=True)
    }


def _seconds_of_exchange(group: str, own: torch.Tensor, calls: int) -> float:
    """Return the mean seconds of consecutive exchanges in a group, without Python's overhead."""
    name = f"measure {len(own)}"
    ops.gather(own, group, name)  # the first frame has the length of earlier messages
    before = communication_counters()
    for _ in range(calls):
        ops.gather(own, group, name)
    return (communication_counters().seconds - before.seconds) / calls


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def launcher() -> tuple[str, str, str] | None:
    """Return the variables of the launcher that started this process as a rank, if one did."""
    return next((names for names in _LAUNCHERS if {*names[:2]} <= os.environ.keys()), None)


@contextlib.contextmanager
def joined_launch(backend: str) -> Iterator[None]:
    """Join the process group of the launcher's ranks, and leave it at the end of the block.

    Args:
        backend: A backend of torch.distributed.

    Raises:
        ValueError: If the environment does not say which ranks there are, or where rank 0 is.
    """
    names = launcher()
    if names is None:
        raise ValueError("launcher: expected its variables, RANK and WORLD_SIZE, got none")
    rank, size, on_this_host = (os.environ.get(name, "") for name in names)
    if "MASTER_ADDR" not in os.environ and on_this_host != size:
        raise ValueError(
            "MASTER_ADDR: expected the address of rank 0, since the ranks may be on several hosts, "
            "got none"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    distributed.init_process_group(backend, rank=int(rank), world_size=int(size))
    try:
        yield
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
