# SPDX-License-Identifier: Apache-2.0
"""convert, revert and to_torch on layers that torch has compiled or given other classes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

import normscope

pytestmark = pytest.mark.portable

# Numbers of order one in float64 (eps 2e-16), through two layers: some hundred roundings.
ROUNDING = 1e-12


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def network() -> Any:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)
    return nn.Sequential(*layers, nn.SyncBatchNorm(4)).double()


def distribute(model: nn.Sequential, how: str) -> None:
    for layer in model:
        if how == "fully_shard":
            fully_shard(layer, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
        elif any(True for _ in layer.parameters()):
            replicate(layer)


def step_of(model: nn.Module) -> list[torch.Tensor]:
    """Run a step; return the ranks' mean of the gradients, and the running statistics."""
    rank = distributed.get_rank()
    x = torch.randn(2 + rank, 3, 4, 4, generator=torch.Generator().manual_seed(rank))
    model(x.double()).pow(3).sum().backward()
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        gradient = gradient.clone()
        distributed.all_reduce(gradient)  # the mean already, unless the model is plain
        gradients.append(gradient / distributed.get_world_size())
    model.zero_grad()
    return gradients + [b.clone() for b in model.buffers() if b.is_floating_point()]


def convert_and_revert(how: str, order: str) -> list[str]:
    plain, model = normscope.convert(network(), "world"), network()
    expected = step_of(plain)
    if order == "convert last":
        distribute(model, how)
    before = [type(layer) for layer in model]
    normscope.convert(model, "world")
    if order == "convert first":
        distribute(model, how)

    assert isinstance(model[1], normscope.BatchNorm2d)
    assert isinstance(model[4], normscope.SyncBatchNorm)
    for got, value in zip(step_of(model), expected, strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=ROUNDING * value.abs().amax().item())
    classes = [type(layer).__name__ for layer in normscope.revert(model)]
    if order == "convert last":
        assert [type(layer) for layer in model] == before
    normscope.convert(model, "world")
    step_of(model)
    normscope.to_torch(model, any_dims=nn.BatchNorm2d)
    for layer in model:
        assert not isinstance(layer, normscope.BatchNorm)
        assert how != "fully_shard" or isinstance(layer, FSDPModule)
    model.eval()(torch.zeros(1, 3, 4, 4, dtype=torch.float64))
    return classes


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("order", ["convert first", "convert last"])
@pytest.mark.parametrize(("how", "prefix"), [("fully_shard", "FSDP"), ("replicate", "DDP")])
def test_layers_of_a_distributed_model_convert_and_revert(
    ranks: RankPool, how: str, prefix: str, order: str
) -> None:
    for classes in ranks.run(2, convert_and_revert, how, order):
        assert classes[1] == f"{prefix}BatchNorm2d"
        assert classes[4] == f"{prefix}SyncBatchNorm"


def sharded_and_parametrized() -> list[str]:
    names = []
    for shard_first in (True, False):
        model = nn.Sequential(nn.BatchNorm2d(4))
        if shard_first:
            distribute(model, "fully_shard")
        parametrize.register_parametrization(model[0], "weight", Doubled())
        if not shard_first:
            distribute(model, "fully_shard")
        normscope.convert(model, "world")
        model(torch.randn(2, 4, 3, 3)).sum().backward()
        names.append(type(model[0]).__name__)
        names.append(type(normscope.revert(model)[0]).__name__)
        assert not isinstance(model[0], normscope.BatchNorm)
    return names


def test_a_layer_can_be_sharded_and_parametrized(ranks: RankPool) -> None:
    for names in ranks.run(2, sharded_and_parametrized):
        assert names == ["ParametrizedFSDPBatchNorm2d"] * 2 + ["FSDPParametrizedBatchNorm2d"] * 2


@pytest.mark.parametrize("compiles", ["torch.compile", "compile"])
def test_a_compiled_layer_gets_the_scope(compiles: str) -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(4, 3) * torch.arange(1, 5)[:, None]
    model = nn.Sequential(layer)
    if compiles == "torch.compile":
        model[0] = torch.compile(layer, backend="eager")  # type: ignore[assignment]
    else:
        layer.compile(backend="eager")
    model(x)
    plain = copy.deepcopy(layer)

    normscope.convert(model, "slices:2")

    expected = torch.cat([nn.BatchNorm1d(3)(part) for part in x.chunk(2)])
    # A few dozen roundings of 1e-7.
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
    assert type(layer) is normscope.BatchNorm1d
    assert type(normscope.revert(model) and layer) is nn.BatchNorm1d
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("compiles", ["script", "trace"])
def test_a_layer_that_torchscript_has_compiled_can_be_left_out_or_in_evaluation(
    compiles: str,
) -> None:
    block = nn.Sequential(nn.BatchNorm1d(3))
    trace = partial(torch.jit.trace, example_inputs=torch.randn(4, 3), check_trace=False)
    jitted: Any = torch.jit.script(block) if compiles == "script" else trace(block)
    model = nn.Sequential(nn.BatchNorm1d(3), jitted)

    normscope.convert(model, "local", exclude="1.0")
    assert type(normscope.revert(model)[0]) is nn.BatchNorm1d
    jitted.eval()
    assert type(normscope.convert(model, "local")[0]) is normscope.BatchNorm1d
