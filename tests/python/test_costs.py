# SPDX-License-Identifier: Apache-2.0
"""Formulas for the cost of exchanges, and the fit of their parameters to times."""

from pathlib import Path

import pytest

from normscope.costs import Costs
from normscope.costs.measurement import TimedExchange, costs_of, fit
from normscope.costs.model import (
    SLOT_BYTES,
    call_terms,
    exchange_seconds,
    shared_memory_terms,
)

# 2 us and 1 ns per byte in shared memory; 30 us and 0.4 ns over the network; 5 us and 0.2 ns more.
COSTS = Costs((2e-6, 1e-9), (3e-5, 4e-10), (5e-6, 2e-10))
# Without the network: what an exchange between hosts takes on each of them.
FREE = Costs((2e-6, 1e-9), (0, 0), (0, 0))


def test_ranks_of_one_host_use_shared_memory_in_pieces() -> None:
    size = SLOT_BYTES + 8

    assert exchange_seconds(size, 1, 2, COSTS) == pytest.approx(2 * 2e-6 + size * 1e-9)


@pytest.mark.parametrize("hosts", [2, 3, 1000])
def test_hosts_of_one_rank_sum_in_a_ring(hosts: int) -> None:
    got = exchange_seconds(5152, hosts, 1, COSTS)

    call = 5e-6 + 6144 * 2e-10
    messages = 2 * (hosts - 1) * (3e-5 + 6144 / hosts * 4e-10)
    assert got == pytest.approx(call + messages)


def test_two_levels_send_pieces_with_a_trailer() -> None:
    piece, rest = 131072, 8

    got = exchange_seconds(piece + rest, 2, 2, COSTS)

    assert got == pytest.approx(
        exchange_seconds(piece, 2, 2, COSTS) + exchange_seconds(rest, 2, 2, COSTS)
    )
    assert exchange_seconds(piece, 2, 2, COSTS) == pytest.approx(
        exchange_seconds(piece, 2, 2, FREE) + exchange_seconds(piece + 16, 2, 1, COSTS)
    )


def test_groups_on_the_same_link_share_its_bandwidth_but_not_its_latency() -> None:
    one = exchange_seconds(1 << 20, 2, 1, COSTS)

    assert exchange_seconds(1 << 20, 2, 1, COSTS, sharing=3) == pytest.approx(
        one + 2 * ((1 << 20) + 1024) * 4e-10
    )


def test_costs_are_saved_and_loaded(tmp_path: Path) -> None:
    for costs in (COSTS, Costs(), Costs.ethernet_25g(), Costs(deviations={"call": 0.125})):
        costs.save(tmp_path / "costs.json")
        assert Costs.load(tmp_path / "costs.json") == costs


def test_the_table_shows_measured_and_missing_costs() -> None:
    lines = str(
        Costs((5e-6, 4e-9), source="here", deviations={"shared_memory": 0.125})
    ).splitlines()

    assert lines[0] == "here"
    assert lines[2].split()[-3:] == ["5.00", "4096.0", "12%"]
    assert lines[3].split() == ["message", "between", "hosts", "not", "measured"]


SIZES = (1056, 16416, 65568, 1048608)


def times_of(costs: Costs) -> dict[str, list[TimedExchange]]:
    """Return the times that the formulas give, as if they were measured."""
    return {
        "call": [TimedExchange(1, size, costs.seconds("call", call_terms(size))) for size in SIZES],
        "shared_memory": [
            TimedExchange(ranks, size, exchange_seconds(size, 1, ranks, costs))
            for ranks in (2, 8)
            for size in SIZES
        ],
        "message": [
            TimedExchange(hosts, size, exchange_seconds(size, hosts, 1, costs))
            for hosts in (2, 4, 8)
            for size in SIZES
        ],
    }


def test_the_fit_recovers_the_parameters() -> None:
    found = costs_of(times_of(COSTS), "here")

    assert found.source == "here"
    assert found.deviations == pytest.approx(dict.fromkeys(times_of(COSTS), 0), abs=1e-9)
    assert found.shared_memory == pytest.approx(COSTS.shared_memory)
    assert found.message == pytest.approx(COSTS.message)
    assert found.call == pytest.approx(COSTS.call)


def test_fitted_numbers_are_not_negative() -> None:
    sizes = (1 << 10, 2 << 10, 4 << 10)
    times = [
        TimedExchange(2, size, seconds)
        for size, seconds in zip(sizes, (4.0, 3.0, 2.0), strict=True)
    ]

    (latency, per_byte), deviation = fit(times, shared_memory_terms, (0, 0))

    assert per_byte == 0
    # The constant with the least squares of relative deviations: sum(1 / t) / sum(1 / t^2).
    assert latency == pytest.approx((1 / 4 + 1 / 3 + 1 / 2) / (1 / 16 + 1 / 9 + 1 / 4))
    assert deviation == pytest.approx(1 - latency / 4)
