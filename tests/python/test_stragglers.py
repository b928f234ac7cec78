# SPDX-License-Identifier: Apache-2.0
"""Waiting for the slowest rank, compared with theory."""

import math

import pytest
import torch

from normscope.stragglers import expected_maximum, simulate_waiting

SPREAD = 0.3


def test_a_single_rank_does_not_wait() -> None:
    waiting = simulate_waiting([[0]] * 5, ranks=1, spread=SPREAD, steps=4000)

    assert waiting.of_exchange == (0.0,) * 5
    # Five passes with a mean of 1; the tolerance is five standard errors.
    assert waiting.step == pytest.approx(5, abs=5 * SPREAD * math.sqrt(5 / 4000))
    assert expected_maximum(1, SPREAD) == 1


def test_the_expected_maximum_of_two_has_a_closed_form() -> None:
    # E max(X, Y) = 2 E[X] Phi(s / sqrt 2) for independent log-normals of the same distribution,
    # whose logarithms have the standard deviation s.
    s = math.sqrt(math.log1p(SPREAD**2))
    expected = 1 + math.erf(s / 2)

    assert expected_maximum(2, SPREAD) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("count", [3, 50, 1000])
def test_the_expected_maximum_matches_samples(count: int) -> None:
    rows = 4_000_000 // count
    s = math.sqrt(math.log1p(SPREAD**2))
    normal = torch.randn(rows, count, generator=torch.Generator().manual_seed(count))
    largest = torch.exp(s * normal - s * s / 2).amax(dim=1).double()

    error = largest.std().item() / math.sqrt(rows)
    assert expected_maximum(count, SPREAD) == pytest.approx(largest.mean().item(), abs=5 * error)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_each_exchange_waits_for_the_slowest_of_its_group(size: int) -> None:
    ranks, steps = 64, 300
    leaders = [rank - rank % size for rank in range(ranks)]

    waiting = simulate_waiting([leaders] * 10, ranks, SPREAD, steps=steps)

    expected = expected_maximum(size, SPREAD) - 1
    for wait in waiting.of_exchange:
        # A pass has the deviation SPREAD, and groups and steps are independent.
        assert wait == pytest.approx(expected, abs=5 * SPREAD / math.sqrt(steps * ranks / size))


def test_with_world_in_each_pass_every_pass_takes_the_maximum() -> None:
    waiting = simulate_waiting([[0] * 100] * 20, 100, SPREAD, steps=200)

    expected = 20 * expected_maximum(100, SPREAD)
    assert waiting.step == pytest.approx(expected, abs=5 * SPREAD * math.sqrt(20 / 200))


def test_with_few_exchanges_late_and_early_passes_cancel() -> None:
    passes, ranks = 100, 64
    world, pairs = [0] * ranks, [rank - rank % 2 for rank in range(ranks)]
    sequences: list[list[list[int] | None]] = [
        [None] * passes,
        [pairs] * passes,
        [world, None] * (passes // 2),
        [world] * passes,
    ]

    steps = [simulate_waiting(groups, ranks, 0.1, steps=50).step for groups in sequences]

    assert steps == sorted(steps)
    # Without exchanges, the sums of passes count. Their deviation is sqrt(passes) times that of a
    # pass, and their mean is passes times as large.
    normal = expected_maximum(ranks, 0.1 / math.sqrt(passes))
    assert steps[0] == pytest.approx(passes * normal, rel=0.01)


def test_groups_of_any_ranks_wait_like_groups_of_neighbours() -> None:
    neighbours = simulate_waiting([[0, 0, 2, 2]] * 4, 4, SPREAD, steps=500)
    others = simulate_waiting([[0, 1, 1, 0]] * 4, 4, SPREAD, steps=500)
    with_one_alone = simulate_waiting([[0, 0, 2, 3]] * 4, 4, SPREAD, steps=500)

    mean = sum(neighbours.of_exchange) / 4
    assert sum(others.of_exchange) / 4 == pytest.approx(mean, rel=0.1)
    assert sum(with_one_alone.of_exchange) / 4 == pytest.approx(mean / 2, rel=0.1)


def test_without_spread_there_is_no_waiting() -> None:
    waiting = simulate_waiting([[0] * 8] * 3, 8, 0.0)

    assert waiting.step == 3
    assert waiting.of_exchange == (0, 0, 0)
    assert expected_maximum(1000, 0.0) == 1


def test_the_seed_determines_the_times() -> None:
    one, other, again = (simulate_waiting([[0] * 8], 8, SPREAD, seed=seed) for seed in (1, 2, 1))

    assert one == again
    assert one != other


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="spread: expected a number of at least 0, got nan"):
        simulate_waiting([None], 2, math.nan)
    with pytest.raises(ValueError, match="spread: expected a number of at least 0, got -1"):
        expected_maximum(2, -1)
    with pytest.raises(ValueError, match="count: expected at least 1, got 0"):
        expected_maximum(0, SPREAD)
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        simulate_waiting([None], 0, SPREAD)
    with pytest.raises(ValueError, match="groups: expected a leader for each of 3 ranks, got 2"):
        simulate_waiting([[0, 0]], 3, SPREAD)
