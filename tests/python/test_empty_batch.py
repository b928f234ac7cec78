# SPDX-License-Identifier: Apache-2.0
"""Ranks, and whole worlds, without samples."""

import pytest
import torch
from rank_pool import RankPool, split_of
from torch import distributed

import normscope

pytestmark = pytest.mark.on_device

Tensors = dict[str, torch.Tensor]


def train_step(x: torch.Tensor, sizes: tuple[int, ...]) -> tuple[Tensors, int]:
    layer = normscope.BatchNorm2d(3)
    part = x[split_of(sizes, distributed.get_rank())].requires_grad_()
    before = normscope.training.communication_counters()
    y = layer(part)
    y.square().sum().backward()
    calls = normscope.training.communication_counters().calls - before.calls
    assert part.grad is not None
    assert layer.weight.grad is not None
    gradients = {"dx": part.grad, "dweight": layer.weight.grad}
    return layer.state_dict() | {"y": y.detach()} | gradients, calls


@pytest.mark.own_kernels
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (2, 0, 2)])
def test_an_empty_rank_takes_part_and_changes_nothing(
    ranks: RankPool, environment: dict[str, str], sizes: tuple[int, ...]
) -> None:
    x = torch.randn(4, 3, 5, 5)
    [(expected, _)] = ranks.run(1, train_step, x, (4,))

    answers = ranks.run(len(sizes), train_step, x, sizes, environment=environment)

    for rank, (got, calls) in enumerate(answers):
        part = split_of(sizes, rank)
        assert calls == 2
        for name in ("y", "dx"):
            assert torch.equal(got[name], expected[name][part])
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(got[name], expected[name])
        if sizes[rank] == 0:
            assert got["dweight"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 3, 0, 5)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_norm_batch_without_elements_updates_nothing(
    ranks: RankPool, shape: tuple[int, ...], size: int
) -> None:
    x = torch.zeros(size * shape[0], *shape[1:])

    answers = ranks.run(size, train_step, x, (shape[0],) * size)

    fresh = normscope.BatchNorm2d(3).state_dict()
    for got, _ in answers:
        assert got["y"].shape == got["dx"].shape == shape
        assert all(torch.equal(got[name], value) for name, value in fresh.items())


def test_slices_of_an_empty_batch_are_empty() -> None:
    layer = normscope.BatchNorm2d(3, scope="slices:4")

    assert layer(torch.zeros(0, 3, 5, 5)).shape == (0, 3, 5, 5)
    assert layer.num_batches_tracked is not None
    assert layer.num_batches_tracked.item() == 0


@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_empty_outputs_have_the_strides_of_torch(
    shape: tuple[int, ...],
    layout: torch.memory_format,
    training: bool,  # noqa: FBT001
) -> None:
    strides = []
    for layer in (normscope.BatchNorm2d(shape[1]), torch.nn.BatchNorm2d(shape[1])):
        x = torch.empty(shape).to(memory_format=layout).clone().requires_grad_()
        y = layer.train(training)(x)
        y.sum().backward()
        assert x.grad is not None
        strides.append((y.stride(), x.grad.stride()))

    assert strides[0] == strides[1]
