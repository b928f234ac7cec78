# SPDX-License-Identifier: Apache-2.0
"""Measures what exchanges cost between the ranks of the default process group."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import distributed

from normscope import _library
from normscope._cost_fit import TimedExchange, fit_call, fit_host, fit_link
from normscope._process_group import gather
from normscope.costs import Costs, LinkCosts
from normscope.counters import communication_counters
from normscope.exchange_times import HostCounts

# Approximate bytes of the messages, for 12 to 13 000 channels. The last ones are longer than a slot
# of shared memory.
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
ROUNDS = 15

# The approximate length of a sample: in a shorter one the scheduler would dominate.
_SAMPLE_SECONDS = 3e-3
_MOST_CALLS = 200
_CALLS_BEFORE = 3

_BYTES_PER_NUMBER = 8
_NUMBERS_ADDED = 4096
_HEADER_NUMBERS = 4

# Gloo sums in a ring. For other backends, the measured times select an algorithm if they can tell
# the two apart. Otherwise a tree is assumed, as in MPICH.
_ALGORITHM_OF_BACKEND = {"gloo": "ring"}
_TRIED = ("ring", "tree")

_SHARED_MEMORY, _FORCE = "NORMSCOPE_SHARED_MEMORY", "NORMSCOPE_FORCE_SYNC"


class _Level(NamedTuple):
    """Groups to time for one kind of link, the largest last."""

    name: str
    groups: list[list[int]]
    environment: dict[str, str]


def measure_costs(*, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Costs:
    """Measure the parameters of docs/scaling.md among the ranks of the default process group.

    All ranks call it together, as ``python -m normscope measure`` does. It times exchanges of the
    library on the host with the most ranks, through shared memory and over the backend: among two
    of its ranks, four, and so on up to all. It also times exchanges among one rank of each of two
    hosts, four, and so on up to all. All hosts are assumed to be alike. All ranks return the same
    costs.

    Args:
        sizes: Approximate bytes of the messages; at least two different sizes.
        rounds: Number of times that each size is timed; the median is used.

    Raises:
        ValueError: If there is no default process group, if it has no CPU backend, or if an
            argument is out of range.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("measure_costs: expected a default process group, got none")
    if "cpu" not in {device.type for device in _group()._device_types}:
        raise ValueError(
            "measure_costs: expected a process group with a CPU backend, such as gloo, got "
            f"{distributed.get_backend()}; for other backends, give Costs with your own values"
        )
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise ValueError(
            f"sizes: expected two or more different sizes of at least 1 byte, got {sizes}"
        )
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    hosts = gather(_library.host_identity())
    times = {
        level.name: [
            timed for ranks in level.groups for timed in _time_group(ranks, level, sizes, rounds)
        ]
        for level in _levels(hosts)
    }
    added = statistics.median(gather(_seconds_per_byte_added(rounds)))
    # On different processors, the fit of the same times can give different bits.
    return gather(costs_of(times, added, str(distributed.get_backend())))[0]


def costs_of(times: dict[str, list[TimedExchange]], added: float, backend: str) -> Costs:
    """Fit the parameters of the model to measured times.

    Args:
        times: Times of the levels ``alone``, ``shared_memory``, ``within_host`` and
            ``between_hosts``.
        added: Seconds per byte of adding.
        backend: Name of the backend; implies its algorithm if too few ranks were measured to
            tell.
    """
    call, copied, error = fit_call(times["alone"])
    known = Costs(call=call, seconds_per_byte_copied=copied, seconds_per_byte_added=added)
    errors = {"call": error}
    points = None
    if times["shared_memory"]:
        points, errors["shared_memory"] = fit_host(times["shared_memory"])

    def fit(name: str, algorithm: str) -> tuple[LinkCosts, float]:
        counts_of = _on_one_host if name == "within_host" else _on_hosts
        return fit_link(times[name], algorithm, counts_of, known)

    measured = [name for name in ("within_host", "between_hosts") if times[name]]
    algorithm = _ALGORITHM_OF_BACKEND.get(backend, "tree")
    # The times of two ranks alone fit every algorithm.
    tells_apart = measured and len({timed.ranks for timed in times[measured[-1]]}) > 1
    if tells_apart and backend not in _ALGORITHM_OF_BACKEND:
        algorithm = min(_TRIED, key=lambda tried: fit(measured[-1], tried)[1])
    links: dict[str, LinkCosts] = {}
    for name in measured:
        links[name], errors[name] = fit(name, algorithm)
    return replace(
        known,
        shared_memory=points,
        within_host=links.get("within_host"),
        between_hosts=links.get("between_hosts"),
        algorithm=algorithm,
        source=f"measured, {backend}",
        errors=errors,
    )


def _on_one_host(ranks: int) -> HostCounts:
    return (ranks,)


def _on_hosts(ranks: int) -> HostCounts:
    return (1,) * ranks


def _levels(hosts: Sequence[int]) -> list[_Level]:
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    fullest = max(by_host.values(), key=len)
    leaders = [ranks[0] for ranks in by_host.values()]
    over_backend = {_SHARED_MEMORY: "0"}
    return [
        _Level("alone", [[0]], over_backend | {_FORCE: "1"}),
        _Level("shared_memory", _beginnings(fullest), {_SHARED_MEMORY: "1"}),
        _Level("within_host", _beginnings(fullest), over_backend),
        _Level("between_hosts", _beginnings(leaders), over_backend),
    ]


def _beginnings(ranks: list[int]) -> list[list[int]]:
    """Return the first two, four, eight and so on of the ranks, and all; nothing for one rank."""
    numbers = {1 << i for i in range(1, len(ranks).bit_length()) if 1 << i <= len(ranks)}
    return [ranks[:number] for number in sorted(numbers | {len(ranks)}) if number > 1]


def _time_group(
    ranks: list[int], level: _Level, sizes: Sequence[int], rounds: int
) -> list[TimedExchange]:
    """Measure the median times of a group's exchanges; every rank returns them."""
    group = distributed.new_group(ranks)
    medians: dict[int, float] = {}
    if distributed.get_rank() in ranks:
        with _environment(level.environment):
            medians = _median_times(group.group_name, len(ranks), sizes, rounds)
    of_ranks = [found for found in gather(medians) if found]
    if distributed.get_rank() in ranks:
        distributed.destroy_process_group(group)
    return [
        TimedExchange(len(ranks), size, statistics.fmean(found[size] for found in of_ranks))
        for size in of_ranks[0]
    ]


def _median_times(group: str, ranks: int, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """Return this rank's median seconds of an exchange, by the bytes of the message."""
    own = [
        torch.ones(max(1, round(size / _BYTES_PER_NUMBER / ranks)), dtype=torch.float64)
        for size in sorted(set(sizes))
    ]
    calls = []
    for numbers in own:
        # The ranks meet, and memory is touched for the first time.
        seconds_of_exchange(group, numbers, _CALLS_BEFORE)
        estimate = seconds_of_exchange(group, numbers, _CALLS_BEFORE)
        slowest = _library.gather(
            torch.tensor([estimate], dtype=torch.float64), group, "measure, calls"
        ).max()
        calls.append(min(_MOST_CALLS, max(1, math.ceil(_SAMPLE_SECONDS / slowest.item()))))
    samples: list[list[float]] = [[] for _ in own]
    for _ in range(rounds):
        for i, numbers in enumerate(own):
            samples[i].append(seconds_of_exchange(group, numbers, calls[i]))
    return {
        (ranks * len(numbers) + _HEADER_NUMBERS) * _BYTES_PER_NUMBER: statistics.median(of_size)
        for numbers, of_size in zip(own, samples, strict=True)
    }


def seconds_of_exchange(group: str, own: torch.Tensor, calls: int) -> float:
    """Return the mean seconds of consecutive exchanges in a group, without Python's overhead.

    Args:
        group: Name of the group; all its ranks call this together.
        own: Float64 [n]; the message has n numbers per rank, and a header of four.
        calls: Number of exchanges.
    """
    name = f"measure {len(own)}"
    _library.gather(own, group, name)  # the first frame has the length of earlier messages
    before = communication_counters()
    for _ in range(calls):
        _library.gather(own, group, name)
    return (communication_counters().seconds - before.seconds) / calls


def _seconds_per_byte_added(rounds: int) -> float:
    """Measure adding float64 numbers in the cache, with one thread as in the library."""
    summand = torch.ones(_NUMBERS_ADDED, dtype=torch.float64)
    total = torch.zeros_like(summand)  # too few numbers for torch to use several threads
    calls = 100
    samples = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            total.add_(summand)
        samples.append((time.perf_counter() - begin) / calls / summand.nbytes)
    return statistics.median(samples)


def _group() -> distributed.ProcessGroup:
    group = distributed.group.WORLD
    assert group is not None  # it is initialized
    return group


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which a group reads when its ranks first meet; restore them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
