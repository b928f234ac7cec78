# SPDX-License-Identifier: Apache-2.0
"""Each scope trains as torch.nn does on exactly the samples that share statistics, in float64."""

from __future__ import annotations

import copy
import os
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from oracle import results_of
from rank_pool import RankPool, connect_ranks, connected_group, split_of
from torch import distributed

import normscope
from normscope import Scope

pytestmark = pytest.mark.portable

# Both sides compute in float64 (eps 2e-16), condition number one; sums have at most 500 terms.
ABSOLUTE = 1e-11

Tensors = dict[str, torch.Tensor]


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a joined input with a different mean for each sample, and its output's gradient."""
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, 2, 3, generator=generator, dtype=torch.float64)
    dy = torch.randn(samples, 3, 2, 3, generator=generator, dtype=torch.float64)
    return x + torch.arange(samples).view(-1, 1, 1, 1), dy


def step_of_rank(scope: str, sizes: tuple[int, ...]) -> Tensors:
    """Step in a scope, after which the text may name the host of each rank."""
    scope, _, hosts = scope.partition(" ")
    if hosts:
        os.environ["NORMSCOPE_NODE"] = hosts[distributed.get_rank()]
    part = split_of(sizes, distributed.get_rank())
    layer = normscope.BatchNorm2d(3, dtype=torch.float64, scope=scope)
    return results_of(layer, *(t[part] for t in batch(sum(sizes))))


def assert_as_torch_on(members: list[int], answers: list[Tensors], sizes: tuple[int, ...]) -> None:
    """Assert that the members' answers are torch's on their joined samples.

    The affine gradients of the members add up to torch's.
    """
    x, dy = (torch.cat([t[split_of(sizes, m)] for m in members]) for t in batch(sum(sizes)))
    expected = results_of(torch.nn.BatchNorm2d(3, dtype=torch.float64), x, dy)
    got = [answers[member] for member in members]
    for name in ("y", "dx"):
        assert_near(torch.cat([answer[name] for answer in got]), expected[name], name)
    for name in ("dweight", "dbias"):
        assert_near(torch.stack([answer[name] for answer in got]).sum(0), expected[name], name)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for answer in got:
            assert_near(answer[name], expected[name], name)


def assert_near(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE, msg=name)


@pytest.mark.parametrize(
    ("scope", "sizes", "sharing"),
    [
        # test_scope_properties.py draws more of them, over shared memory.
        ("group:4", (2, 1, 3, 1, 2, 4), [[0, 1, 2, 3], [4, 5]]),
        ("node", (2, 3, 1), [[0, 1, 2]]),
        # With the host of each rank.
        ("node ab", (2, 3), [[0], [1]]),
        ("node aab", (2, 3, 2), [[0, 1], [2]]),
        ("node abab", (2, 3, 2, 4), [[0, 2], [1, 3]]),
        ("node aabbcb", (2, 3, 2, 4, 2, 1), [[0, 1], [2, 3, 5], [4]]),
        ("ranks:5,1,3/0,2", (2, 1, 3, 1, 4, 4), [[0, 2], [1, 3, 5], [4]]),
        ("norm_batch:3", (2, 2, 1), [[0, 1], [2]]),
    ],
)
def test_ranks_that_share_train_like_torch_on_their_joined_samples(
    ranks: RankPool,
    environment: dict[str, str],
    scope: str,
    sizes: tuple[int, ...],
    sharing: list[list[int]],
) -> None:
    answers = ranks.run(len(sizes), step_of_rank, scope, sizes, environment=environment)

    for members in sharing:
        assert_as_torch_on(members, answers, sizes)


def step_of_domain(scope: str, sizes: tuple[int, ...], domains: str) -> Tensors:
    """Step with the layer of this rank's domain."""
    part = split_of(sizes, distributed.get_rank())
    norms = torch.nn.ModuleDict({one: torch.nn.BatchNorm2d(3) for one in domains}).double()
    normscope.convert(norms, scope)
    return results_of(norms[domains[distributed.get_rank()]], *(t[part] for t in batch(sum(sizes))))


@pytest.mark.parametrize("scope", ["ranks:0,1/2,3", "group:2", "norm_batch:3"])
def test_parts_of_a_scope_may_begin_with_different_layers(
    ranks: RankPool, environment: dict[str, str], scope: str
) -> None:
    sizes = (2, 1, 2, 2)

    answers = ranks.run(4, step_of_domain, scope, sizes, "aabb", environment=environment)

    for members in ([0, 1], [2, 3]):
        assert_as_torch_on(members, answers, sizes)


def slices_of_norm_batch(scope: str) -> list[torch.Tensor]:
    x, _ = batch(9)
    return [
        normscope.BatchNorm2d(3, dtype=torch.float64, scope=s)(x).detach()
        for s in (scope, "slices:4")
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_a_norm_batch_that_fits_twice_is_slices(ranks: RankPool, size: int) -> None:
    for got, expected in ranks.run(size, slices_of_norm_batch, "norm_batch:2"):
        assert torch.equal(got, expected)


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


@pytest.mark.parametrize("scope", ["group:4", "node", "ranks:2,3", "norm_batch:8"])
def test_with_one_rank_every_scope_stays_within_it(ranks: RankPool, scope: str) -> None:
    sizes = (4,)

    assert_as_torch_on([0], [step_alone(scope)], sizes)
    assert_as_torch_on([0], ranks.run(1, step_of_rank, scope, sizes), sizes)


def step_alone(scope: str) -> Tensors:
    return results_of(normscope.BatchNorm2d(3, dtype=torch.float64, scope=scope), *batch(4))


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
