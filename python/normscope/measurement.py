# SPDX-License-Identifier: Apache-2.0
"""Measures what exchanges cost between the ranks that are there."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from torch import distributed

from normscope import _library
from normscope._cost_fit import TimedExchange, fit_call, fit_host, fit_link
from normscope.costs import Costs, LinkCosts
from normscope.counters import communication_counters
from normscope.exchange_times import HostCounts

# Bytes of messages, about: of 12 channels to 13 000. The last is beyond what one slot of shared
# memory holds.
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
ROUNDS = 15

# A sample, so that it shows more of the exchanges than of the scheduler.
_SAMPLE_SECONDS = 3e-3
_MOST_CALLS = 200
_CALLS_BEFORE = 3

_BYTES_PER_NUMBER = 8
_NUMBERS_ADDED = 4096
_HEADER_NUMBERS = 4

# Gloo sums in a ring, others as MPICH does; what was measured decides, if it can tell.
_TRIED = ("ring", "tree")
_ALGORITHM_OF_BACKEND = {"gloo": "ring"}

_SHARED_MEMORY, _FORCE = "NORMSCOPE_SHARED_MEMORY", "NORMSCOPE_FORCE_SYNC"

Value = TypeVar("Value")


class _Level(NamedTuple):
    """Groups that are timed for one kind of link, the largest last."""

    name: str
    groups: list[list[int]]
    environment: dict[str, str]


def measure_costs(*, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> Costs:
    """Measure the parameters of docs/scaling.md among the ranks of the default process group.

    All ranks call it together; ``python -m normscope measure`` does. It times exchanges of the
    library: within the host that holds the most ranks, through shared memory and by the backend,
    for two of its ranks, four, and so on up to all; and among one rank of each host. Hosts count
    as alike. All ranks return the same.

    Args:
        sizes: Bytes of the messages, about; at least two different ones.
        rounds: How often each is timed; the median counts.

    Raises:
        ValueError: If there is no default process group, or none that serves the host's memory,
            or an argument is out of range.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise ValueError("measure_costs: expected a default process group, got none")
    if "cpu" not in {device.type for device in _group()._device_types}:
        raise ValueError(
            "measure_costs: expected a process group that serves the host's memory, as gloo, got "
            f"{distributed.get_backend()}; for others, give Costs of what the network promises"
        )
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise ValueError(f"sizes: expected two lengths and more, from 1 byte on, got {sizes}")
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    hosts = _gather(_library.host_identity())
    times = {
        level.name: [
            timed for ranks in level.groups for timed in _time_group(ranks, level, sizes, rounds)
        ]
        for level in _levels(hosts)
    }
    added = statistics.median(_gather(_seconds_per_byte_added(rounds)))
    # The same times need not give the same bits on processors that are not alike.
    return _gather(costs_of(times, added, str(distributed.get_backend())))[0]


def costs_of(times: dict[str, list[TimedExchange]], added: float, backend: str) -> Costs:
    """The parameters that measured times follow.

    Args:
        times: Of the levels ``alone``, ``shared_memory``, ``within_host``, ``between_hosts``.
        added: Seconds per byte of adding.
        backend: By whose name its algorithm is known, if too few ranks tell.
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
    # Of two ranks alone every algorithm can be true.
    if measured and len({timed.ranks for timed in times[measured[-1]]}) > 1:
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
    """The first two, four, eight and so on, and all, if they are several."""
    numbers = {1 << i for i in range(1, len(ranks).bit_length()) if 1 << i <= len(ranks)}
    return [ranks[:number] for number in sorted(numbers | {len(ranks)}) if number > 1]


def _time_group(
    ranks: list[int], level: _Level, sizes: Sequence[int], rounds: int
) -> list[TimedExchange]:
    """The median times of a group's exchanges, on every rank."""
    group = distributed.new_group(ranks)
    medians: dict[int, float] = {}
    if distributed.get_rank() in ranks:
        with _environment(level.environment):
            medians = _median_times(group.group_name, len(ranks), sizes, rounds)
    of_ranks = [found for found in _gather(medians) if found]
    if distributed.get_rank() in ranks:
        distributed.destroy_process_group(group)
    return [
        TimedExchange(len(ranks), size, statistics.fmean(found[size] for found in of_ranks))
        for size in of_ranks[0]
    ]


def _median_times(group: str, ranks: int, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """By the bytes of the messages."""
    own = [
        torch.ones(max(1, round(size / _BYTES_PER_NUMBER / ranks)), dtype=torch.float64)
        for size in sorted(set(sizes))
    ]
    calls = []
    for numbers in own:
        seconds_of_exchange(group, numbers, _CALLS_BEFORE)  # the first meeting, and fresh memory
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
    """The mean time of exchanges in a group, one after the other, without what Python adds.

    Args:
        group: Its name; all its ranks call this together.
        own: Float64 [n]; the message has n numbers for each rank, and a header of four.
        calls: How many.
    """
    name = f"measure {len(own)}"
    _library.gather(own, group, name)  # the backend's frame is of the length before
    before = communication_counters()
    for _ in range(calls):
        _library.gather(own, group, name)
    return (communication_counters().seconds - before.seconds) / calls


def _seconds_per_byte_added(rounds: int) -> float:
    """Of adding float64 numbers that lie in a cache, on one thread as the library adds."""
    summand = torch.ones(_NUMBERS_ADDED, dtype=torch.float64)
    total = torch.zeros_like(summand)  # too few numbers for torch to take threads
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


def _gather(own: Value) -> list[Value]:
    """What each rank has, on every rank."""
    values: list[Value | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, own)
    return [value for value in values if value is not None]


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """A group reads them when its ranks meet for the first time."""
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
