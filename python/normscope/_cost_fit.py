# SPDX-License-Identifier: Apache-2.0
"""The parameters of normscope.costs that measured times follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from normscope.costs import FRAME_BYTES, SLOT_BYTES, Costs, HostCosts, LinkCosts, padded_bytes
from normscope.exchange_times import (
    BACKEND_SECONDS,
    HostCounts,
    backend_call_seconds,
    doubling_seconds,
    halving_seconds,
)

# A tree's formula depends on its parameters, since the faster of two ways counts.
_TURNS = 8

# 20 us and 1 GB/s: where those turns begin.
_FIRST_LINK = LinkCosts(20e-6, 1e-9)


@dataclass(frozen=True)
class TimedExchange:
    """Ranks, bytes of the message and seconds that it took."""

    ranks: int
    size: int
    seconds: float


def fit_host(times: Sequence[TimedExchange]) -> tuple[tuple[HostCosts, ...], float]:
    """Points for shared memory, and the largest relative deviation from them.

    Args:
        times: Exchanges of several lengths for each number of ranks.
    """
    points, worst = [], 0.0
    for ranks in sorted({time.ranks for time in times}):
        chosen = [time for time in times if time.ranks == ranks]
        rows = [[math.ceil(time.size / SLOT_BYTES), time.size] for time in chosen]
        (latency, per_byte), error = least_squares(rows, [time.seconds for time in chosen])
        points.append(HostCosts(ranks, latency, per_byte))
        worst = max(worst, error)
    return tuple(points), worst


def fit_call(times: Sequence[TimedExchange]) -> tuple[float, float, float]:
    """Seconds of an all-reduce that sends nothing, per call and per byte, and the deviation.

    Args:
        times: Exchanges of a rank with itself over the backend.
    """
    rows = [[1, padded_bytes(time.size, FRAME_BYTES)] for time in times]
    (call, per_byte), error = least_squares(rows, [time.seconds for time in times])
    return call, per_byte, error


def fit_link(
    times: Sequence[TimedExchange],
    algorithm: str,
    counts_of: Callable[[int], HostCounts],
    costs: Costs,
) -> tuple[LinkCosts, float]:
    """The link whose messages explain the backend's exchanges, and the largest deviation.

    Args:
        times: Exchanges over one kind of link.
        algorithm: Of the backend.
        counts_of: How so many ranks lie on hosts.
        costs: What is known: all but the links.
    """
    added = costs.seconds_per_byte_added
    seconds = BACKEND_SECONDS[algorithm]

    def share(time: TimedExchange, link: LinkCosts, adding: float, *, like: LinkCosts) -> float:
        """What a link, one number of which is 1, takes by the way that is fastest for `like`."""
        size, counts = padded_bytes(time.size, costs.frame_bytes), counts_of(time.ranks)
        way = seconds
        if algorithm == "tree":
            doubles = doubling_seconds(size, counts, like, like, added)
            halves = halving_seconds(size, counts, like, like, added)
            way = doubling_seconds if doubles <= halves else halving_seconds
        return way(size, counts, link, link, adding)

    link, error = _FIRST_LINK, math.inf
    for _ in range(_TURNS):
        rows, rest = [], []
        for time in times:
            rows.append(
                [
                    share(time, LinkCosts(1, 0), 0, like=link),
                    share(time, LinkCosts(0, 1), 0, like=link),
                ]
            )
            known = share(time, LinkCosts(0, 0), added, like=link)
            known += backend_call_seconds(padded_bytes(time.size, costs.frame_bytes), costs)
            rest.append(known)
        (latency, per_byte), error = least_squares(
            rows, [time.seconds for time in times], known=rest
        )
        before, link = link, LinkCosts(latency, per_byte)
        if link == before:
            break
    return link, error


def least_squares(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    known: Sequence[float] | None = None,
) -> tuple[list[float], float]:
    """Coefficients of at least 0 with the least squares of relative deviations.

    Args:
        rows: What each time has of each coefficient.
        seconds: The times.
        known: A part of each time that has no coefficient.

    Returns:
        The coefficients, and the largest relative deviation.
    """
    whole = torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / whole[:, None]
    constant = torch.zeros_like(whole) if known is None else torch.tensor(known).double() / whole
    # Columns of one size: seconds per byte are small.
    scale = matrix.norm(dim=0).clamp_min(1e-300)
    best = torch.zeros(matrix.shape[1], dtype=torch.float64)
    best_squares = (1 - constant).square().sum().item()
    count = matrix.shape[1]
    for subset in itertools.product((False, True), repeat=count):
        columns = [i for i in range(count) if subset[i]]
        if not columns:
            continue
        part = (matrix / scale)[:, columns]
        found = torch.linalg.lstsq(part, (1 - constant)[:, None]).solution[:, 0]
        squares = (part @ found + constant - 1).square().sum().item()
        if bool((found >= 0).all()) and squares < best_squares:
            best = torch.zeros_like(best)
            best[columns] = found / scale[columns]
            best_squares = squares
    deviation = (matrix @ best + constant - 1).abs().max().item()
    return best.tolist(), deviation
