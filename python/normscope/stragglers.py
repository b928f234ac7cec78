# SPDX-License-Identifier: Apache-2.0
"""Simulates what waiting for the slowest rank costs if the times of ranks vary randomly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Beyond this many standard deviations, the density of a normal variable is below 1e-22.
_FAR = 10.0
_INTERVALS = 2000


def expected_maximum(count: int, spread: float) -> float:
    """Return the expected maximum of independent log-normal variables of mean 1.

    Args:
        count: Number of variables, at least 1.
        spread: Their standard deviation.

    Example:
        >>> expected_maximum(1, 0.1)
        1.0
        >>> round(expected_maximum(1000, 0.1), 2)
        1.38
    """
    if count < 1:
        raise ValueError(f"count: expected at least 1, got {count}")
    _check_spread(spread)
    if count == 1 or spread == 0:
        return 1.0
    log_mean, log_deviation = _log_moments(spread)

    # Simpson's rule for the integral of exp(log_mean + log_deviation z) over the density of the
    # largest z.
    def integrand(z: float) -> float:
        tail = 0.5 * math.erfc(abs(z) / math.sqrt(2))
        log_below = math.log(tail) if z < 0 else math.log1p(-tail)
        log_density = -0.5 * z * z - 0.5 * math.log(2 * math.pi)
        exponent = log_mean + log_deviation * z + math.log(count) + log_density
        return math.exp(exponent + (count - 1) * log_below)

    begin, end = -_FAR, _FAR + log_deviation
    width = (end - begin) / _INTERVALS
    weights = [4 if i % 2 else 2 for i in range(1, _INTERVALS)]
    inner = sum(w * integrand(begin + i * width) for i, w in enumerate(weights, 1))
    return (integrand(begin) + inner + integrand(end)) * width / 3


@dataclass(frozen=True)
class Waiting:
    """Time of a step in which ranks wait for each other; the unit is the mean time of a pass.

    Args:
        step: Time until the last rank is done; the mean over the steps.
        of_exchange: Time that a rank waits in each exchange; the mean over ranks and steps.
    """

    step: float
    of_exchange: tuple[float, ...]


def simulate_waiting(
    groups: Sequence[Sequence[int] | None],
    ranks: int,
    spread: float,
    *,
    steps: int = 20,
    seed: int = 0,
) -> Waiting:
    """Simulate steps of passes whose times are independent and log-normal with a mean of 1.

    After each pass the ranks of a group wait for their slowest, as they do in the exchange of a
    layer's forward or backward. After the last pass all ranks wait, as they do for gradients.

    Args:
        groups: For each pass of a step, in order, the leader of every rank: ranks with the same
            leader wait for each other. None if no rank waits after the pass.
        ranks: Number of ranks.
        spread: Standard deviation of the time of a pass.
        steps: Number of steps to average over.
        seed: Seed of the times. The same seed gives the same times for any ``groups``.

    Example:
        >>> alone = simulate_waiting([None] * 10, ranks=8, spread=0.2)
        >>> together = simulate_waiting([[0] * 8] * 10, ranks=8, spread=0.2)
        >>> alone.step < together.step
        True
    """
    _check_spread(spread)
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    log_mean, log_deviation = _log_moments(spread)
    generator = torch.Generator().manual_seed(seed)
    known: dict[int, int | torch.Tensor] = {}  # by the identity of the caller's sequence
    now = torch.zeros(steps, ranks, dtype=torch.float64)
    waits = []
    for leaders in groups:
        normal = torch.randn(steps, ranks, dtype=torch.float64, generator=generator)
        now = now + torch.exp(log_mean + log_deviation * normal)
        if leaders is None or ranks == 1:
            waits.append(0.0)
            continue
        groups_of_pass = known.get(id(leaders))
        if groups_of_pass is None:
            groups_of_pass = known[id(leaders)] = _groups_of(leaders, ranks)
        together = _latest(now, groups_of_pass)
        waits.append((together - now).mean().item())
        now = together
    return Waiting(now.amax(dim=1).mean().item(), tuple(waits))


def _groups_of(leaders: Sequence[int], ranks: int) -> int | torch.Tensor:
    """Return the size of the groups if they are consecutive and equal; else each rank's leader."""
    if len(leaders) != ranks:
        raise ValueError(f"groups: expected a leader for each of {ranks} ranks, got {len(leaders)}")
    index = torch.tensor(leaders)
    size = int((index == index[0]).sum())
    places = torch.arange(ranks)
    is_even = ranks % size == 0 and torch.equal(index, places - places % size)
    return size if is_even else index


def _latest(now: torch.Tensor, groups: int | torch.Tensor) -> torch.Tensor:
    """Return for each rank the latest time in its group."""
    if isinstance(groups, int):
        of_group = now.view(now.shape[0], -1, groups).amax(dim=2, keepdim=True)
        return of_group.expand(-1, -1, groups).reshape(now.shape)
    index = groups.expand_as(now)
    latest = torch.zeros_like(now).scatter_reduce(1, index, now, "amax")
    return latest.gather(1, index)


def _check_spread(spread: float) -> None:
    if not 0 <= spread < math.inf:
        raise ValueError(f"spread: expected a number of at least 0, got {spread}")


def _log_moments(spread: float) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of a log-normal variable of mean 1."""
    variance = math.log1p(spread * spread)
    return -variance / 2, math.sqrt(variance)
