# SPDX-License-Identifier: Apache-2.0
"""Tensors of torch.distributed.tensor, and other classes that derive from torch.Tensor."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from oracle import IS_TORCH_2_11
from rank_pool import RankPool
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import normscope

pytestmark = pytest.mark.portable

PLACEMENTS = {"batch": Shard(0), "channels": Shard(1), "whole": Replicate()}

# A few dozen roundings of 1e-7, of numbers of order one.
TOLERANCE = 1e-5


def errors_of(placement: str, scope: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(4, 4, 3), mesh, [PLACEMENTS[placement]])
    model = normscope.convert(nn.Sequential(nn.BatchNorm1d(4)), scope)
    parallel = distribute_module(copy.deepcopy(model), mesh)
    given = [(model, x), (parallel, x), (parallel, torch.randn(4, 4, 3))]
    errors = []
    for net, value in given:
        with pytest.raises(RuntimeError) as error:
            net(value)
        errors.append(str(error.value))
        distributed.barrier()
    if not IS_TORCH_2_11:  # torch's own function, which does not take a DTensor there
        assert isinstance(parallel.eval()(x), DTensor)
    return errors


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("placement", "scope"), [("batch", "world"), ("channels", "local"), ("whole", "world")]
)
def test_distributed_tensors_are_refused_in_training(
    ranks: RankPool, placement: str, scope: str
) -> None:
    running = "running_mean, running_var, num_batches_tracked"
    for errors in ranks.run(2, errors_of, placement, scope):
        got = [
            re.fullmatch(r"0( of model 2)?: expected .*got a DTensor for (.*); call .*", e)
            for e in errors
        ]
        assert [each and each[2] for each in got] == [
            "x",
            f"x, weight, bias, {running}",
            f"weight, bias, {running}",
        ]
        assert all("x.to_local()" in error for error in errors)


def local_parts() -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    x = distribute_tensor(whole, mesh, [Shard(0)])
    layer = normscope.BatchNorm1d(4, process_group=mesh)
    y = DTensor.from_local(layer(x.to_local()), mesh, [Shard(0)])
    return y.full_tensor().detach(), nn.BatchNorm1d(4)(whole).detach()


def test_the_local_parts_of_a_batch_share_the_statistics_of_its_mesh(ranks: RankPool) -> None:
    for got, expected in ranks.run(2, local_parts):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def in_tensor_parallel() -> tuple[torch.Tensor, torch.Tensor, str]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    expected = plain(x).detach()
    model = normscope.convert(plain, "local")
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    y = model(x)
    y.square().sum().backward()
    parallelize_module(model, mesh, {"3": SequenceParallel(sequence_dim=0)})
    with pytest.raises(RuntimeError) as error:
        model(x)
    return y.detach(), expected, str(error.value)


@pytest.mark.own_kernels
def test_a_layer_between_parallel_ones_trains(ranks: RankPool) -> None:
    for got, expected, error in ranks.run(2, in_tensor_parallel):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
        assert "got a DTensor for x, weight" in error


class Named(torch.Tensor):
    """A class without a dispatch of its own."""


def test_the_output_has_the_class_of_the_input() -> None:
    layer = normscope.BatchNorm1d(3)

    assert type(layer(torch.randn(4, 3).as_subclass(Named))) is Named
