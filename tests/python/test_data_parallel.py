# SPDX-License-Identifier: Apache-2.0
"""FSDP2 trains like one process; layers keep their process group."""

import copy
import pickle

import pytest
import torch
from rank_pool import RankPool, connected_group, error_of, split_of
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import normscope

pytestmark = pytest.mark.portable

SIZES = (3, 5)
STEPS = 5

# Relative to the largest entry, in float64 (eps 2e-16): five steps of three layers amplify little.
RELATIVE = 1e-10


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3)
    ).double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(sum(SIZES), 3, 8, 8, dtype=torch.float64, generator=generator)


def train(net: nn.Module, part: slice, scale: float) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (net(batch(step)[part]).square().sum() * scale).backward()
        optimizer.step()
    return net.state_dict()


def train_sharded_rank() -> dict[str, torch.Tensor]:
    """Train with FSDP2, where each rank has a part of every parameter."""
    net = normscope.convert(network(), "world")
    mesh = init_device_mesh("cpu", (len(SIZES),))
    for layer in net.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    part = split_of(SIZES, distributed.get_rank())
    # FSDP2 averages gradients that should be summed.
    state = train(net, part, scale=len(SIZES) / sum(SIZES))
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}


def test_two_uneven_ranks_of_fully_shard_train_as_one_process(ranks: RankPool) -> None:
    expected = train(network(), slice(None), scale=1 / sum(SIZES))

    for got in ranks.run(2, train_sharded_rank):
        for name, value in expected.items():
            allowed = RELATIVE * value.abs().amax().item()
            torch.testing.assert_close(got[name], value, rtol=0, atol=allowed, msg=name)


def copy_with_a_group() -> list[float]:
    group = connected_group([0, 1])
    layer = normscope.BatchNorm1d(1, momentum=1.0, process_group=group)
    means = []
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        rank = float(distributed.get_rank())
        other(torch.tensor([[rank], [rank]]))
        assert other.running_mean is not None
        means.append(other.running_mean.item())
    return means


def test_a_layer_with_a_group_can_be_copied_and_pickled(ranks: RankPool) -> None:
    assert ranks.run(2, copy_with_a_group) == [[0.5, 0.5]] * 2


def name_a_group_that_is_gone() -> str:
    group = connected_group([0, 1])
    layer = normscope.BatchNorm1d(1, process_group=group)
    distributed.destroy_process_group(group)
    return error_of(lambda: layer(torch.randn(2, 1)), RuntimeError)


def test_a_destroyed_group_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, name_a_group_that_is_gone):
        assert message.startswith("process_group: expected a process group of this process, got")
