# SPDX-License-Identifier: Apache-2.0
"""Fits the parameters of normscope.costs to measured times."""

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

# The formula of a tree is the faster of two algorithms, and which one that is depends on the
# parameters: fit several times.
_TURNS = 8

# The first guess: 20 us and 1 GB/s.
_FIRST_LINK = LinkCosts(20e-6, 1e-9)


@dataclass(frozen=True)
class TimedExchange:
    """Number of ranks of an exchange, bytes of its message, and seconds that it took."""

    ranks: int
    size: int
    seconds: float


def fit_host(times: Sequence[TimedExchange]) -> tuple[tuple[HostCosts, ...], float]:
    """Fit the costs of shared memory; return them and the largest relative deviation.

    Args:
        times: Exchanges of several sizes for each number of ranks.
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
    """Fit the seconds of an all-reduce that sends nothing.

    Args:
        times: Exchanges of a rank with itself over the backend.

    Returns:
        Seconds per call, seconds per byte, and the largest relative deviation.
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
    """Fit a link to exchanges of the backend; return it and the largest relative deviation.

    Args:
        times: Exchanges over one kind of link.
        algorithm: The backend's algorithm.
        counts_of: Returns the ranks on each host for a number of ranks.
        costs: The other parameters, which are known.
    """
    added = costs.seconds_per_byte_added
    seconds = BACKEND_SECONDS[algorithm]

    def share(time: TimedExchange, link: LinkCosts, adding: float, *, like: LinkCosts) -> float:
        """Return the seconds over a link, by the formula that is faster for the link `like`.

        If one number of the link is 1 and the other 0, this is that number's coefficient.
        """
        size, counts = padded_bytes(time.size, costs.frame_bytes), counts_of(time.ranks)
        formula = seconds
        if algorithm == "tree":
            doubles = doubling_seconds(size, counts, like, like, added)
            halves = halving_seconds(size, counts, like, like, added)
            formula = doubling_seconds if doubles <= halves else halving_seconds
        return formula(size, counts, link, link, adding)

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
    """Find the non-negative coefficients that minimize the squares of the relative deviations.

    Args:
        rows: For each time, the factor of each coefficient.
        seconds: The times.
        known: For each time, seconds that do not depend on the coefficients.

    Returns:
        The coefficients, and the largest relative deviation.
    """
    whole = torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / whole[:, None]
    constant = torch.zeros_like(whole) if known is None else torch.tensor(known).double() / whole
    # Scale the columns to the same size: seconds per byte are small.
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
