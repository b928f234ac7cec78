# SPDX-License-Identifier: Apache-2.0
"""recommend_scopes on several ranks."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, cast

import pytest
import torch
from noisy_network import noise_batches, small_network, trained
from rank_pool import RankPool, error_of
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import normscope


def _error_with_ranks() -> str:
    return error_of(
        lambda: normscope.recommend_scopes(small_network(), noise_batches(4), ranks=2), ValueError
    )


def test_ranks_are_those_of_the_process_group(ranks: RankPool) -> None:
    for error in ranks.run(2, _error_with_ranks):
        assert "ranks: expected None, since the process group has 2, got 2" in error


@pytest.mark.parametrize(
    ("size", "how"), [(2, "whole"), (3, "whole"), (4, "whole"), (2, "sharded")]
)
def test_ranks_get_the_same_plan_as_one_process_with_parts(
    ranks: RankPool, size: int, how: str
) -> None:
    plans = ranks.run(size, _plan_of_rank, how)
    alone = normscope.recommend_scopes(
        small_network().eval(), noise_batches(12), 0.5, ranks=size, include="*"
    )

    assert all(plan == plans[0] for plan in plans)
    for of_ranks, of_slices in zip(plans[0].layers, alone.layers, strict=True):
        assert of_ranks.scope == of_slices.scope
        for one, other in zip(of_ranks.candidates, of_slices.candidates, strict=True):
            # The last bits of the layers' float32 inputs depend on how a batch is cut.
            assert one.noise == pytest.approx(other.noise, rel=1e-4)
            assert (one.samples, one.elements) == (other.samples, other.elements)
    assert plans[0].layers[0].exchange_seconds is not None


def _plan_of_rank(how: str) -> normscope.ScopePlan:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    shares = [batch.chunk(size)[rank] for batch in noise_batches(12)]
    network = small_network().eval()
    mesh: Any = None
    if how == "sharded":
        mesh = init_device_mesh("cpu", (size,))
        for layer in (*network.children(), network):
            fully_shard(layer, mesh=mesh)
    return normscope.recommend_scopes(network, shares, 0.5, include="*", process_group=mesh)


def test_a_group_of_one_host_is_called_node(ranks: RankPool) -> None:
    for scopes in ranks.run(4, _scopes_on_two_hosts):
        assert scopes == ["local", "node", "world"]


def _scopes_on_two_hosts() -> list[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NORMSCOPE_NODE", f"host {distributed.get_rank() // 2}")
        plan = normscope.recommend_scopes(small_network().eval(), noise_batches(4), include="*")
    return [candidate.scope for candidate in plan.layers[0].candidates]


def _empty_on_one_rank() -> list[tuple[float, int]]:
    """Return noise and elements of the layers if the last rank has no samples in its batches."""
    size, rank = distributed.get_world_size(), distributed.get_rank()
    own = [
        batch.chunk(size - 1)[rank] if rank < size - 1 else batch[:0] for batch in noise_batches(8)
    ]
    plan = normscope.recommend_scopes(small_network().eval(), own, include="*")
    return [(each.candidates[0].noise, each.candidates[0].elements) for each in plan.layers]


def test_a_rank_may_have_empty_batches(ranks: RankPool) -> None:
    of_ranks = ranks.run(3, _empty_on_one_rank)

    alone = normscope.recommend_scopes(
        small_network().eval(), noise_batches(8), ranks=2, include="*"
    )
    for measured in of_ranks:
        for (noise, elements), layer in zip(measured, alone.layers, strict=True):
            # The last bits of the layers' float32 inputs depend on how a batch is cut.
            assert noise == pytest.approx(layer.candidates[0].noise, rel=1e-4)
            assert elements == layer.candidates[0].elements


def test_outputs_of_other_sizes_on_each_rank_are_measured(ranks: RankPool) -> None:
    noise = ranks.run(2, _noise_of_ragged_sequences)

    assert noise[0] == noise[1] > 0


class _Sequences(nn.Module):
    """Outputs [N, length, classes], as of a transformer, in which dimension 1 differs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = normscope.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x).square().mT
        return y


def _noise_of_ragged_sequences() -> float:
    rank = distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)
    own = [torch.randn(2, 4, 8 + 3 * rank, generator=generator) for _ in range(4)]
    plan = normscope.recommend_scopes(trained(_Sequences()), own)
    return plan.layers[0].candidates[0].noise


def test_compiled_models_are_measured_and_wrapped_ones_refused(ranks: RankPool) -> None:
    for compiled, plain, error in ranks.run(2, _plans_of_wrapped_models):
        assert compiled == plain
        assert error == (
            "model: expected the model in the DistributedDataParallel, got the "
            "wrapper; pass model.module"
        )


def _plans_of_wrapped_models() -> tuple[list[Any], list[Any], str]:
    rank = distributed.get_rank()
    batches = [batch.chunk(2)[rank] for batch in noise_batches(8)]
    compiled = torch.compile(small_network().eval(), backend="eager")
    compiled(batches[0])
    parallel = nn.parallel.DistributedDataParallel(small_network().eval())
    of_compiled, of_plain = (
        [
            (layer.scope, layer.candidates)
            for layer in normscope.recommend_scopes(model, batches, include="*").layers
        ]
        for model in (cast("nn.Module", compiled), parallel.module)
    )
    error = error_of(lambda: normscope.recommend_scopes(parallel, batches, include="*"), ValueError)
    return of_compiled, of_plain, error


def test_a_plan_for_another_number_of_ranks_causes_a_warning(ranks: RankPool) -> None:
    for text in ranks.run(2, _warning_of_other_ranks):
        assert text == [
            "plan: made for 4 ranks, and applied among 2, where its scopes were not measured"
        ]


def _warning_of_other_ranks() -> list[str]:
    network = small_network()
    plan = normscope.recommend_scopes(
        network.eval(), [b.chunk(2)[0] for b in noise_batches(16)], include="*"
    )
    other = dataclasses.replace(plan, ranks=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.apply(network)
        other.apply(network)
    return [str(warning.message) for warning in caught]
