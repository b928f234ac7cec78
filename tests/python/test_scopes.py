# SPDX-License-Identifier: Apache-2.0
"""How scopes resolve, in groups too; test_scope_properties.py has what each of them computes."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from oracle import results_of
from rank_pool import RankPool, connect_ranks, connected_group
from torch import distributed

import normscope
from normscope import Scope

pytestmark = pytest.mark.portable


def mean_of_domain(scope: str) -> float:
    """Return the running mean of the layer of this rank's domain, which gets the rank's number."""
    rank = distributed.get_rank()
    norms = torch.nn.ModuleDict({name: torch.nn.BatchNorm1d(1, momentum=1.0) for name in "ab"})
    layer = normscope.convert(norms, scope)["aabb"[rank]]
    layer(torch.full(((2, 1, 2, 2)[rank], 1), float(rank)))
    mean: float = layer.get_buffer("running_mean").item()
    return mean


@pytest.mark.parametrize("scope", ["ranks:0,1/2,3", "group:2", "norm_batch:3"])
def test_parts_of_a_scope_may_begin_with_different_layers(
    ranks: RankPool, environment: dict[str, str], scope: str
) -> None:
    means = ranks.run(4, mean_of_domain, scope, environment=environment)

    assert means == pytest.approx([1 / 3, 1 / 3, 2.5, 2.5])


def calls_with_an_uneven_first_batch(first: tuple[int, ...]) -> list[int]:
    """Return the exchanges under norm_batch:4 with a first batch, then with batches of 4."""
    layer = normscope.BatchNorm1d(2, scope="norm_batch:4")
    calls = [normscope.training.communication_counters().calls]
    for samples in (first[distributed.get_rank()], 4, 4):
        layer(torch.randn(samples, 2))
        calls.append(normscope.training.communication_counters().calls)
    return [after - before for before, after in pairwise(calls)]


def test_norm_batch_uses_the_largest_first_batch(ranks: RankPool) -> None:
    # 4 samples on one rank: local on all ranks.
    assert ranks.run(2, calls_with_an_uneven_first_batch, (4, 3)) == [[1, 0, 0]] * 2
    # 2 samples: the world of two ranks, also for the following batches of 4.
    assert ranks.run(2, calls_with_an_uneven_first_batch, (2, 0)) == [[2, 1, 1]] * 2
    # No samples on any rank: the ranks agree again with the next batch.
    assert ranks.run(2, calls_with_an_uneven_first_batch, (0, 0)) == [[2, 1, 0]] * 2


def means_of_scopes_in_groups() -> list[float]:
    """Use two models with scopes in different process groups alternately."""
    rank = distributed.get_rank()
    pairs = [connected_group(members) for members in ([0, 2, 4], [1, 3, 5])]
    halves = [connected_group(members) for members in ([0, 1, 2], [3, 4, 5])]
    layers = [
        normscope.BatchNorm1d(1, momentum=1.0, scope=scope, process_group=group)
        for scope, group in [
            ("group:2", pairs[rank % 2]),
            ("group:2", None),
            ("ranks:0,2", halves[rank // 3]),
            ("world", halves[rank // 3]),
            ("group:2", pairs[rank % 2]),
        ]
    ]
    for _ in range(2):
        for layer in layers:
            layer(torch.full((2, 1), float(rank)))
    return [layer.running_mean.item() for layer in layers if layer.running_mean is not None]


def test_scopes_use_the_ranks_of_their_process_group_and_do_not_mix(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    means = ranks.run(6, means_of_scopes_in_groups, environment=environment)

    in_pairs, in_all, in_sets, in_halves, again = map(list, zip(*means, strict=True))
    assert in_pairs == again == [1, 2, 1, 2, 4, 5]  # {0, 2}, {4}; {1, 3}, {5}
    assert in_all == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5]
    assert in_sets == [1, 1, 1, 4, 4, 4]  # {0, 2}, {1}; {3, 5}, {4}
    assert in_halves == [1, 1, 1, 4, 4, 4]


def calls_of_steps(scopes: list[str]) -> list[int]:
    layers = [normscope.BatchNorm1d(2, scope=scope) for scope in scopes]
    calls = []
    for layer in layers:
        before = normscope.training.communication_counters().calls
        layer(torch.randn(4, 2)).sum().backward()
        calls.append(normscope.training.communication_counters().calls - before)
    return calls


def test_ranks_agree_on_a_scope_once(ranks: RankPool) -> None:
    scopes = ["group:2", "group:2", "ranks:0,1/2,3", "group:2", "ranks:0,1/2,3", "group:4"]

    assert ranks.run(4, calls_of_steps, scopes) == [[3, 2, 3, 2, 2, 3]] * 4


def means_in_groups_made_anew(folder: str) -> list[float]:
    """Use default groups of the same name and different sizes, one after the other."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    seen = []
    for attempt, scope in enumerate(["group:2", "ranks:0,2", "group:2"]):
        layer = normscope.BatchNorm1d(1, momentum=1.0, scope=scope)
        layer(torch.full((2, 1), rank + 10.0 * attempt))
        assert layer.running_mean is not None
        seen.append(layer.running_mean.item())
        distributed.destroy_process_group()
        connect_ranks(f"{folder}/{attempt}", rank, size)
    return seen


def test_a_scope_follows_a_new_process_group_of_the_same_name(
    ranks: RankPool, tmp_path: Path, environment: dict[str, str]
) -> None:
    means = ranks.run(3, means_in_groups_made_anew, str(tmp_path), environment=environment)

    assert means == [[0.5, 11, 20.5], [0.5, 11, 20.5], [2, 11, 22]]


def has_the_bits_of_local(scope: str) -> bool:
    x = torch.randn(4, 3, 2, 3)
    steps = [results_of(normscope.BatchNorm2d(3, scope=each), x) for each in (scope, "local")]
    return all(torch.equal(value, steps[1][name]) for name, value in steps[0].items())


@pytest.mark.parametrize("scope", ["world", "group:4", "node", "ranks:2,3", "norm_batch:8"])
def test_with_one_rank_every_scope_stays_within_it(ranks: RankPool, scope: str) -> None:
    assert has_the_bits_of_local(scope)
    assert ranks.run(1, has_the_bits_of_local, scope) == [True]


def test_constructors_write_what_can_be_parsed() -> None:
    assert str(Scope.slices(8)) == "slices:8"
    assert str(Scope.local()) == "local"
    assert str(Scope.group(4)) == "group:4"
    assert str(Scope.node()) == "node"
    assert str(Scope.world()) == "world"
    assert str(Scope.ranks([[0, 1], [2, 3]])) == "ranks:0,1/2,3"
    assert str(Scope.norm_batch(32)) == "norm_batch:32"


def test_scopes_are_immutable_and_can_be_copied() -> None:
    scope = Scope("ranks:0,1/2,3")

    with pytest.raises(AttributeError):
        scope.text = "local"  # type: ignore[misc]
    for other in (copy.deepcopy(scope), pickle.loads(pickle.dumps(scope)), Scope(scope)):  # type: ignore[arg-type]
        assert other == scope
        assert hash(other) == hash(scope)
