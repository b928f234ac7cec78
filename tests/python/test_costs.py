# SPDX-License-Identifier: Apache-2.0
"""Formulas for the cost of exchanges, and the fit of their parameters to times."""

import dataclasses
import math
from pathlib import Path

import pytest

from normscope import Costs, HostCosts, LinkCosts, _library
from normscope._cost_fit import TimedExchange, fit_call, fit_host, fit_link, least_squares
from normscope.costs import SLOT_BYTES, message_bytes, padded_bytes
from normscope.exchange_times import (
    BACKEND_SECONDS,
    HostCounts,
    doubling_seconds,
    exchange_seconds,
    flat_seconds,
    halving_seconds,
    ring_seconds,
    tree_seconds,
)
from normscope.measurement import costs_of

# With these numbers, different formulas give different times.
FAR, NEAR, ADDED = LinkCosts(1000, 3), LinkCosts(7, 0.125), 0.01
SHARED_MEMORY = (HostCosts(2, 2e-6, 1e-9), HostCosts(8, 5e-6, 4e-9))
COSTS = Costs(
    SHARED_MEMORY,
    LinkCosts(1e-6, 2e-10),
    LinkCosts(3e-5, 4e-10),
    call=5e-6,
    seconds_per_byte_copied=2e-10,
    seconds_per_byte_added=1e-10,
)
NUMBERS_ON_HOST = (COSTS.on_host(4), COSTS.on_host(2))


@pytest.mark.parametrize("channels", [1, 64, 409, 410, 2048])
def test_message_bytes_are_those_of_the_library(channels: int) -> None:
    assert message_bytes(channels) == _library.message_bytes(channels)


@pytest.mark.parametrize(
    ("size", "padded"), [(8, 1024), (1008, 1024), (1016, 2048), (message_bytes(409), 32768)]
)
def test_messages_are_padded_with_their_length(size: int, padded: int) -> None:
    assert padded_bytes(size, 1024) == padded


@pytest.mark.parametrize("counts", [(1,), (4,), (1, 1), (8,) * 5, (3, 1)])
def test_ring_sends_each_part_around_twice(counts: HostCounts) -> None:
    ranks, hosts = sum(counts), len(counts)
    size = 1200

    got = ring_seconds(size, counts, FAR, NEAR, ADDED)

    hops = 2 * (ranks - 1)
    far_hops = hops * hosts / ranks if hosts > 1 else 0
    slowest = FAR if hosts > 1 else NEAR
    sent = hops * size / ranks * slowest.seconds_per_byte
    added = (ranks - 1) / ranks * size * ADDED
    latency = far_hops * FAR.latency + (hops - far_hops) * NEAR.latency
    assert got == pytest.approx(latency + sent + added)


def test_flat_sends_all_messages_to_one_rank_and_back() -> None:
    near = 2 * (7 + 100 * 0.125) * 3
    far = 2 * (1000 + 100 * 3) * 8

    assert flat_seconds(100, (4, 4, 4), FAR, NEAR, ADDED) == pytest.approx(near + far + 11)


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_trees_of_powers_of_two_follow_thakur_rabenseifner_and_gropp(steps: int) -> None:
    ranks, size = 1 << steps, 4096
    counts = (1,) * ranks

    doubling = doubling_seconds(size, counts, FAR, NEAR, ADDED)
    halving = halving_seconds(size, counts, FAR, NEAR, ADDED)

    share = (ranks - 1) / ranks
    assert doubling == pytest.approx(steps * (1000 + size * 3 + size * ADDED))
    assert halving == pytest.approx(2 * steps * 1000 + share * size * (2 * 3 + ADDED))


def test_ranks_beyond_a_power_of_two_add_two_messages() -> None:
    folding = 2 * (1000 + 64 * 3) + 64 * ADDED

    for seconds in (doubling_seconds, halving_seconds):
        of_four = seconds(64, (1,) * 4, FAR, NEAR, ADDED)
        assert seconds(64, (1,) * 6, FAR, NEAR, ADDED) == pytest.approx(of_four + folding)


def test_ranks_of_a_host_share_its_link_to_others() -> None:
    within = 2 * (7 + 64 * 0.125 + 64 * ADDED)
    between = 1000 + 4 * 64 * 3 + 64 * ADDED  # all four ranks of a host send at the same time

    assert doubling_seconds(64, (4, 4), FAR, NEAR, ADDED) == pytest.approx(within + between)


def test_a_tree_doubles_short_messages_and_halves_long_ones() -> None:
    counts = (1,) * 64

    for size, way in ((8, doubling_seconds), (1 << 20, halving_seconds)):
        expected = way(size, counts, FAR, NEAR, ADDED)
        assert tree_seconds(size, counts, FAR, NEAR, ADDED) == expected


def test_a_single_rank_exchanges_nothing() -> None:
    assert exchange_seconds(5152, (1,), Costs()) == 0
    for seconds in BACKEND_SECONDS.values():
        assert seconds(5152, (1,), FAR, NEAR, ADDED) == 0


def test_ranks_of_one_host_use_shared_memory_in_pieces() -> None:
    size = SLOT_BYTES + 8

    for algorithm in (None, "two-level", "ring"):
        got = exchange_seconds(size, (2,), COSTS, algorithm)
        assert got == pytest.approx(2 * 2e-6 + size * 1e-9)


def test_messages_over_the_backend_are_padded() -> None:
    def expected(size: int) -> float:
        return 5e-6 + size * 2e-10 + 2 * (3e-5 + size / 2 * 4e-10) + size / 2 * 1e-10

    assert exchange_seconds(5152, (1, 1), COSTS) == pytest.approx(expected(6144))
    no_frames = dataclasses.replace(COSTS, frame_bytes=0)
    assert exchange_seconds(5152, (1, 1), no_frames) == pytest.approx(expected(5152))


def test_the_time_of_two_levels_is_their_sum() -> None:
    size, (four, two) = 5152, NUMBERS_ON_HOST

    got = exchange_seconds(size, (4, 4, 2), COSTS)

    there = four.latency + size * four.seconds_per_byte
    back = four.latency + size * two.seconds_per_byte
    leaders = exchange_seconds(size, (1, 1, 1), COSTS, COSTS.algorithm)
    assert got == pytest.approx(there + leaders + back)
    for counts in ((4, 4, 2), (1, 1)):
        default = exchange_seconds(size, counts, COSTS)
        assert exchange_seconds(size, counts, COSTS, "two-level") == default


def test_two_levels_send_pieces_with_a_trailer() -> None:
    piece, rest = 131072, 8

    got = exchange_seconds(piece + rest, (2, 2), COSTS)

    def of_piece(size: int) -> float:
        leaders = exchange_seconds(size + 16, (1, 1), COSTS)
        return 2 * NUMBERS_ON_HOST[1].latency + 2 * size * 1e-9 + leaders

    assert got == pytest.approx(of_piece(piece) + of_piece(rest))


def test_backends_for_devices_use_a_single_level() -> None:
    nccl = dataclasses.replace(COSTS, frame_bytes=0)

    default = exchange_seconds(5152, (4, 4), nccl)

    assert default == exchange_seconds(5152, (4, 4), nccl, "ring")


def test_groups_on_the_same_link_share_its_bandwidth_but_not_its_latency() -> None:
    one = exchange_seconds(1 << 20, (1, 1), COSTS)

    assert exchange_seconds(1 << 20, (1, 1), COSTS, sharing=3) == pytest.approx(
        one + 2 * ((1 << 20) + 1024) * 4e-10
    )


def test_unknown_algorithms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^algorithm: expected None or one of flat, .*, got star"):
        exchange_seconds(5152, (1, 1), COSTS, "star")


def test_missing_costs_are_named() -> None:
    with pytest.raises(ValueError, match=r"^costs: expected between_hosts, since .*, got None"):
        exchange_seconds(5152, (1, 1), Costs(SHARED_MEMORY))
    with pytest.raises(ValueError, match=r"^costs: expected shared_memory, since .*, got None"):
        exchange_seconds(5152, (2,), Costs(between_hosts=LinkCosts(1, 1)))


@pytest.mark.parametrize(
    ("points", "ranks", "latency"),
    [
        (SHARED_MEMORY, 2, 2e-6),
        (SHARED_MEMORY, 5, 3.5e-6),
        (SHARED_MEMORY, 8, 5e-6),
        (SHARED_MEMORY, 14, 8e-6),
        (SHARED_MEMORY[:1], 4, 6e-6),
        ((HostCosts(4, 9e-6, 0), HostCosts(8, 1e-6, 0)), 16, 0),
        ((HostCosts(4, 4e-6, 0), HostCosts(8, 8e-6, 0)), 2, 2e-6),
    ],
)
def test_unmeasured_numbers_of_ranks_are_interpolated(
    points: tuple[HostCosts, ...], ranks: int, latency: float
) -> None:
    assert Costs(points).on_host(ranks).latency == pytest.approx(latency)


def test_costs_are_saved_and_loaded(tmp_path: Path) -> None:
    for costs in (COSTS, Costs(), Costs.ethernet_25g(), Costs.infiniband_100g()):
        costs.save(tmp_path / "costs.json")
        assert Costs.load(tmp_path / "costs.json") == costs


@pytest.mark.parametrize("text", ["", "[]", "{}x", '{"speed": 1}', '{"call": -1}', '{"call": "1"}'])
def test_files_without_costs_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"costs.json: expected what `python -m normscope measure"):
        Costs.load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "bus"}, "algorithm: expected one of flat, ring, tree, got bus"),
        ({"call": math.nan}, "call: expected numbers of at least 0, got nan"),
        ({"between_hosts": LinkCosts(-1, 0)}, "between_hosts: expected numbers of at least 0"),
        ({"shared_memory": ()}, "shared_memory: expected increasing numbers of ranks"),
        ({"shared_memory": (HostCosts(1, 0, 0),)}, "shared_memory: expected increasing numbers"),
    ],
)
def test_invalid_costs_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(**fields)  # type: ignore[arg-type]


def test_the_table_shows_measured_and_missing_costs() -> None:
    text = str(Costs(SHARED_MEMORY, source="here", errors={"shared_memory": 0.125}))

    assert "shared memory, 8 ranks            5.00      4096.0    0.25" in text
    assert "not measured: within_host, between_hosts" in text
    assert "shared_memory 12%" in text


SIZES = (1056, 16416, 65568, 1048608)


def timed(
    costs: Costs, ranks: int, algorithm: str | None, *, one_host: bool = False
) -> list[TimedExchange]:
    """Return the times that the formulas give, as if they were measured."""
    counts = (ranks,) if one_host else (1,) * ranks
    return [
        TimedExchange(ranks, size, exchange_seconds(size, counts, costs, algorithm))
        for size in SIZES
    ]


def test_the_fit_recovers_shared_memory() -> None:
    times = timed(COSTS, 2, None, one_host=True) + timed(COSTS, 8, None, one_host=True)

    points, error = fit_host(times)

    assert error < 1e-9
    for point, expected in zip(points, SHARED_MEMORY, strict=True):
        assert point.ranks == expected.ranks
        assert point.latency == pytest.approx(expected.latency)
        assert point.seconds_per_byte == pytest.approx(expected.seconds_per_byte)


def test_the_fit_recovers_the_time_of_a_call() -> None:
    times = [
        TimedExchange(1, size, 5e-6 + 2e-10 * padded_bytes(size, COSTS.frame_bytes))
        for size in SIZES
    ]

    call, copied, error = fit_call(times)

    assert call == pytest.approx(5e-6)
    assert copied == pytest.approx(2e-10)
    assert error < 1e-9


@pytest.mark.parametrize("algorithm", ["flat", "ring", "tree"])
def test_the_fit_recovers_the_link(algorithm: str) -> None:
    costs = dataclasses.replace(COSTS, algorithm=algorithm)
    times = [time for ranks in (2, 4, 8) for time in timed(costs, ranks, algorithm)]

    link, error = fit_link(times, algorithm, lambda ranks: (1,) * ranks, costs)

    assert costs.between_hosts is not None
    assert link.latency == pytest.approx(costs.between_hosts.latency)
    assert link.seconds_per_byte == pytest.approx(costs.between_hosts.seconds_per_byte)
    assert error < 1e-6


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_times_for_several_numbers_of_ranks_reveal_the_algorithm(algorithm: str) -> None:
    truth = dataclasses.replace(COSTS, algorithm=algorithm)
    alone = [
        TimedExchange(1, size, 5e-6 + 2e-10 * padded_bytes(size, COSTS.frame_bytes))
        for size in SIZES
    ]
    times = {
        "alone": alone,
        "shared_memory": [],
        "within_host": [],
        "between_hosts": [t for n in (2, 4, 8) for t in timed(truth, n, algorithm)],
    }

    found = costs_of(times, 1e-10, "unknown")

    assert found.algorithm == algorithm
    assert found.between_hosts is not None
    assert found.between_hosts.latency == pytest.approx(3e-5)
    assert found.within_host is None
    assert found.shared_memory is None


def test_the_algorithm_of_a_known_backend_does_not_depend_on_measured_times() -> None:
    truth = dataclasses.replace(COSTS, algorithm="tree")
    alone = [TimedExchange(1, size, 5e-6) for size in SIZES]
    of_tree = [t for n in (2, 4, 8) for t in timed(truth, n, "tree")]
    times = {"alone": alone, "shared_memory": [], "within_host": [], "between_hosts": of_tree}

    assert costs_of(times, 1e-10, "gloo").algorithm == "ring"


def test_coefficients_are_not_negative() -> None:
    (constant, slope), error = least_squares([[1, 1], [1, 2], [1, 4]], [4.0, 3.0, 2.0])

    assert slope == 0
    # The constant with the least squares of relative deviations: sum(1 / t) / sum(1 / t^2).
    assert constant == pytest.approx((1 / 4 + 1 / 3 + 1 / 2) / (1 / 16 + 1 / 9 + 1 / 4))
    assert error == pytest.approx(1 - constant / 4)
