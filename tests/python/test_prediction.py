# SPDX-License-Identifier: Apache-2.0
"""Predictions for scopes on given hosts, compared with real ranks and with theory."""

from pathlib import Path

import pytest
import torch
from noisy_network import noise_batches, small_network
from rank_pool import RankPool
from torch import distributed, nn

import normscope
from normscope import Scope
from normscope._binding import ops
from normscope.costs import Costs, predict
from normscope.costs.model import exchange_seconds
from normscope.costs.prediction import Division, division_of

HOSTS, RANKS_PER_HOST = 2, 2
RANKS = HOSTS * RANKS_PER_HOST
HOST_OF_RANK = [0, 0, 1, 1]
COSTS = Costs.ethernet_25g()
SCOPES = [
    "local",
    "slices:2",
    "group:2",
    "group:3",
    "group:4",
    "node",
    "world",
    "ranks:0,3/1,2",
    "ranks:1,2",
    "norm_batch:2",
    "norm_batch:4",
    "norm_batch:5",
    "norm_batch:100",
]
# Samples per rank, and values per sample and channel: a single sample is enough for statistics.
SAMPLES, VALUES = 2, 3


def test_scopes_divide_hosts_that_need_not_exist_like_real_ranks(ranks: RankPool) -> None:
    got = ranks.run(RANKS, _members_by_scope)

    for scope in SCOPES:
        _, leaders = ops.divide_ranks(scope, SAMPLES, HOST_OF_RANK)
        for rank in range(RANKS):
            members = {other for other in range(RANKS) if leaders[other] == leaders[rank]}
            assert got[rank][scope] == members, (scope, rank)


def _members_by_scope() -> dict[str, set[int]]:
    """Return for each scope the ranks with which this one shares statistics.

    The inputs are 1 in the rank's own channel and 0 in the others. The running mean then shows
    which ranks took part.
    """
    rank = distributed.get_rank()
    found = {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NORMSCOPE_NODE", f"host {rank // RANKS_PER_HOST}")
        for scope in SCOPES:
            layer = normscope.BatchNorm1d(RANKS, momentum=1.0, scope=scope)
            own = nn.functional.one_hot(torch.tensor(rank), RANKS).float()
            layer(own.expand(SAMPLES, VALUES, RANKS).movedim(2, 1))
            assert layer.running_mean is not None
            found[scope] = set(layer.running_mean.nonzero().flatten().tolist())
    return found


@pytest.mark.parametrize("scope", ["group:5", "ranks:0,4"])
def test_scopes_that_do_not_fit_are_errors_as_in_training(ranks: RankPool, scope: str) -> None:
    layers = [("bn", 3, scope)]

    of_library = ranks.run(RANKS, _error_of, scope)
    with pytest.raises(ValueError, match=f"^bn: scope: {scope}: expected .*") as error:
        predict(layers, hosts=HOSTS, ranks_per_host=RANKS_PER_HOST, costs=COSTS)

    assert all(str(error.value).removeprefix("bn: ") in text for text in of_library)
    # A single rank shares with nobody, for any scope.
    assert predict(layers, hosts=1, ranks_per_host=1, costs=COSTS).exchanges == 0


def _error_of(scope: str) -> str:
    with pytest.raises(ValueError, match="scope") as error:
        normscope.BatchNorm1d(3, scope=scope)(torch.randn(4, 3))
    normscope.BatchNorm1d(3)(torch.randn(4, 3))  # the group still works
    return str(error.value)


@pytest.mark.parametrize(
    ("samples", "wanted", "resolved"),
    [(64, 8, "slices:8"), (3, 7, "group:3"), (1, 12, "world")],
)
def test_norm_batches_resolve_for_the_samples(samples: int, wanted: int, resolved: str) -> None:
    layers = [("bn", 3, f"norm_batch:{wanted}")]

    [layer] = predict(layers, hosts=3, ranks_per_host=4, costs=COSTS, samples=samples).layers

    assert layer.scope == resolved


@pytest.mark.own_kernels
def test_predicted_exchanges_and_bytes_are_those_counted(ranks: RankPool) -> None:
    counted = ranks.run(RANKS, _counted_by_scope)

    for scope in SCOPES:
        layers = [("0", 3, scope), ("1", 700, scope)]
        of_rank = [of_scope[scope] for of_scope in counted]
        predicted = predict(
            layers, hosts=HOSTS, ranks_per_host=RANKS_PER_HOST, costs=COSTS, samples=SAMPLES
        )
        # Ranks that share with nobody send nothing: compare the largest counts.
        assert max(of_rank) == (predicted.exchanges, predicted.bytes), scope


def _counted_by_scope() -> dict[str, tuple[int, int]]:
    counted = {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NORMSCOPE_NODE", f"host {distributed.get_rank() // RANKS_PER_HOST}")
        for scope in SCOPES:
            layers = [nn.BatchNorm1d(3), nn.Conv1d(3, 700, 1), nn.BatchNorm1d(700)]
            network = normscope.convert(nn.Sequential(*layers), scope)
            x = torch.randn(SAMPLES, 3, VALUES)
            network(x)  # the ranks agree on scopes at the first use
            before = normscope.training.communication_counters()
            network(x).sum().backward()
            after = normscope.training.communication_counters()
            counted[scope] = (after.calls - before.calls, after.bytes - before.bytes)
    return counted


@pytest.mark.parametrize(
    ("scope", "ranks", "groups", "sharing"),
    [
        ("world", 24, {(3, 8)}, 1),
        ("node", 8, {(1, 8)}, 1),
        ("group:4", 4, {(1, 4)}, 1),
        # Ranks 0 to 4, 5 to 9, 10 to 14, 15 to 19 and 20 to 23.
        ("group:5", 5, {(1, 5), (2, 3), (2, 4), (1, 4)}, 2),
        ("group:16", 16, {(2, 8), (1, 8)}, 1),
        ("ranks:0,8/1,9/2,10,18", 3, {(2, 1), (3, 1)}, 3),
        ("local", 1, set(), 1),
    ],
)
def test_groups_are_divided_among_hosts(
    scope: str, ranks: int, groups: set[tuple[int, int]], sharing: int
) -> None:
    host_of_rank = [rank // 8 for rank in range(24)]

    division = division_of(Scope(scope), host_of_rank, None)

    assert division == Division(scope, ranks, frozenset(groups), sharing)


def test_a_step_costs_the_sum_of_its_layers() -> None:
    layers = [("a", 8, "world"), ("b", 8, "local"), ("c", 800, "node")]

    found = predict(layers, hosts=10, ranks_per_host=8, costs=COSTS, step_time=0.1)

    assert found.exchanges == 4
    assert found.layers[1].seconds == 0
    assert found.seconds == pytest.approx(
        2 * exchange_seconds(672, 10, 8, COSTS) + 2 * exchange_seconds(64032, 1, 8, COSTS)
    )
    assert found.share == pytest.approx(found.seconds / (0.1 + found.seconds))


def test_a_plan_is_predicted_like_its_layers() -> None:
    plan = normscope.recommend_scopes(
        small_network().eval(), noise_batches(8), 1, ranks=2, include="*"
    )
    layers = [(layer.layer, layer.channels, layer.scope) for layer in plan.layers]

    of_plan, of_layers = (
        predict(each, hosts=2, ranks_per_host=1, costs=COSTS) for each in (plan, layers)
    )

    assert of_plan == of_layers
    assert of_plan.exchanges == plan.exchanges_per_step
    assert of_plan.bytes == plan.bytes_per_step


def test_costs_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    COSTS.save(file)

    of_file, of_costs = (
        predict([("bn", 3, "world")], hosts=2, ranks_per_host=1, costs=costs)
        for costs in (file, COSTS)
    )

    assert of_file == of_costs


def test_a_plan_without_layers_costs_nothing() -> None:
    plan = normscope.ScopePlan((), allowed=0.05, noise=0, standard_error=0, ranks=2, batches=4)

    prediction = predict(plan, hosts=2, ranks_per_host=1, costs=COSTS)

    assert str(prediction).endswith("per step 0 exchanges and 0 bytes sent by a rank; 0.000 ms")


def test_frozen_layers_do_not_count() -> None:
    network = normscope.convert(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(8)), "world")

    def names() -> list[str]:
        prediction = predict(network, hosts=2, ranks_per_host=1, costs=COSTS)
        return [layer.layer for layer in prediction.layers]

    assert names() == ["0", "1"]
    network[0].eval()
    assert names() == ["1"]
