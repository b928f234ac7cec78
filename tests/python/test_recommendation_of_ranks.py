# SPDX-License-Identifier: Apache-2.0
"""recommend_scopes on several ranks."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from noisy_network import noise_batches, small_network
from rank_pool import RankPool
from torch import distributed, nn

import normscope

OTHER_NUMBERS = (
    "ValueError: independent_values: expected the same number on every rank, got [4.0, 5.0]"
)
NOT_FINITE = "ValueError: batches: expected finite inputs of every layer, got NaN or infinity in 1"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_get_the_same_plan_as_one_process_with_parts(ranks: RankPool, size: int) -> None:
    plans = ranks.run(size, _plan_of_rank)
    alone = normscope.recommend_scopes(
        small_network().eval(), noise_batches(12), 12, ranks=size, include="*"
    )

    assert all(plan == plans[0] for plan in plans)
    for of_ranks, of_slices in zip(plans[0].layers, alone.layers, strict=True):
        assert of_ranks.scope == of_slices.scope
        for one, other in zip(of_ranks.candidates, of_slices.candidates, strict=True):
            assert one.values is not None
            assert other.values is not None
            # The last bits of the layers' float32 inputs depend on how a batch is cut.
            assert one.values.value == pytest.approx(other.values.value, rel=1e-4)
    assert plans[0].layers[0].exchange_seconds is not None


def _plan_of_rank() -> normscope.ScopePlan:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    shares = [batch.chunk(size)[rank] for batch in noise_batches(12)]
    return normscope.recommend_scopes(small_network().eval(), shares, 12, include="*")


def test_a_group_of_one_host_is_called_node(ranks: RankPool) -> None:
    for scopes in ranks.run(4, _scopes_on_two_hosts):
        assert scopes == ["local", "node", "world"]


def _scopes_on_two_hosts() -> list[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NORMSCOPE_NODE", f"host {distributed.get_rank() // 2}")
        plan = normscope.recommend_scopes(small_network().eval(), noise_batches(4), include="*")
    return [candidate.scope for candidate in plan.layers[0].candidates]


@pytest.mark.own_kernels
def test_a_plan_of_ranks_saves_exchanges(ranks: RankPool) -> None:
    for sent, planned in ranks.run(2, _bytes_of_step):
        assert sent == planned


def _bytes_of_step() -> tuple[int, int]:
    """Return the bytes that a step sends under the plan, and the number that the plan predicts."""
    rank = distributed.get_rank()
    network = small_network()
    shares = [batch.chunk(2)[rank] for batch in noise_batches(32)]
    plan = normscope.recommend_scopes(network, shares, 24)
    plan.apply(network)
    network(shares[0])  # the ranks agree on scopes when they are first used
    before = normscope.training.communication_counters().bytes
    network(shares[0]).sum().backward()
    assert plan.exchanges_per_step == 2
    return normscope.training.communication_counters().bytes - before, plan.bytes_per_step


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("length", ["known", "unknown", "wrong"])
def test_ranks_with_different_numbers_of_batches_raise(ranks: RankPool, length: str) -> None:
    got = "[1, 2, 3]" if length == "known" else "1 on ranks [0] and more on the others"
    for error, again in ranks.run(3, _error_with_uneven_batches, length):
        assert error == (
            "ValueError: batches: expected the same number on every rank, since layers "
            f"synchronize, got {got}"
        )
        # The group still works.
        assert again == ["local", "world"]


class _OfLength(list[torch.Tensor]):
    """Batches with a wrong length of two."""

    def __len__(self) -> int:
        return 2


def _error_with_uneven_batches(length: str) -> tuple[str, list[str]]:
    own = noise_batches(4, count=1 + distributed.get_rank())
    batches = {"known": own, "unknown": iter(own), "wrong": _OfLength(own)}[length]
    error = _error_of(lambda: normscope.recommend_scopes(small_network(), batches))
    plan = _plan_of_rank()
    return error, [str(scope) for scope in plan.scopes.values()]


@pytest.mark.parametrize(
    ("kind", "of_rank_0", "of_rank_1"),
    [
        ("failing batches", "OSError: no such image", "no such image"),
        ("no number", "ValueError: independent_values: expected at least 2, got nan", "rank 0"),
        ("other numbers", OTHER_NUMBERS, OTHER_NUMBERS),
        ("a NaN in a batch", NOT_FINITE, NOT_FINITE),
    ],
)
def test_an_error_of_one_rank_ends_the_wait_of_the_others(
    ranks: RankPool, kind: str, of_rank_0: str, of_rank_1: str
) -> None:
    one, other = ranks.run(2, _error_of_kind, kind)

    assert one == of_rank_0
    assert of_rank_1 in other


def _error_of_kind(kind: str) -> str:
    rank, batches, wanted = distributed.get_rank(), noise_batches(4), 4.0
    if kind == "failing batches" and rank == 0:
        batches = _FailAtTheEnd(batches)
    elif kind == "no number" and rank == 0:
        wanted = math.nan
    elif kind == "other numbers":
        wanted += rank
    elif kind == "a NaN in a batch" and rank == 1:
        batches[0][0, 0, 0, 0] = math.nan
    return _error_of(lambda: normscope.recommend_scopes(small_network(), batches, wanted))


class _FailAtTheEnd(list[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from super().__iter__()
        raise OSError("no such image")


def _empty_on_one_rank() -> list[float]:
    """Return the values of the layers if the last rank has no samples in some batches."""
    size, rank = distributed.get_world_size(), distributed.get_rank()
    own = [
        batch.chunk(size - 1)[rank] if rank < size - 1 else batch[:0] for batch in noise_batches(8)
    ]
    plan = normscope.recommend_scopes(small_network().eval(), own, 2, include="*")
    assert all(each.candidates[0].values is not None for each in plan.layers)
    return [each.candidates[0].values.value for each in plan.layers if each.candidates[0].values]


def test_a_rank_may_have_empty_batches(ranks: RankPool) -> None:
    two = ranks.run(3, _empty_on_one_rank)

    alone = normscope.recommend_scopes(
        small_network().eval(), noise_batches(8), 2, ranks=2, include="*"
    )
    for values in two:
        for value, layer in zip(values, alone.layers, strict=True):
            assert layer.candidates[0].values is not None
            # The last bits of the layers' float32 inputs depend on how a batch is cut.
            assert value == pytest.approx(layer.candidates[0].values.value, rel=1e-4)


def test_compiled_and_parallel_models_are_measured(ranks: RankPool) -> None:
    for compiled, parallel, plain in ranks.run(2, _plans_of_wrapped_models):
        assert compiled == parallel == plain


def _plans_of_wrapped_models() -> list[list[Any]]:
    rank = distributed.get_rank()
    batches = [batch.chunk(2)[rank] for batch in noise_batches(8)]
    compiled = torch.compile(small_network().eval(), backend="eager")
    compiled(batches[0])
    parallel = nn.parallel.DistributedDataParallel(small_network().eval())
    models: list[nn.Module] = [cast("nn.Module", compiled), parallel, parallel.module]
    plans = [normscope.recommend_scopes(model, batches, include="*") for model in models]
    return [
        [(layer.scope, [each.values for each in layer.candidates]) for layer in plan.layers]
        for plan in plans
    ]


def test_a_plan_for_another_number_of_ranks_causes_a_warning(ranks: RankPool) -> None:
    for text in ranks.run(2, _warning_of_other_ranks):
        assert text == [
            "plan: made for 4 ranks, and applied among 2, where its scopes were not measured"
        ]


def _warning_of_other_ranks() -> list[str]:
    network = small_network()
    plan = normscope.recommend_scopes(
        network.eval(), [b.chunk(2)[0] for b in noise_batches(16)], 2, include="*"
    )
    other = dataclasses.replace(plan, ranks=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.apply(network)
        other.apply(network)
    return [str(warning.message) for warning in caught]
