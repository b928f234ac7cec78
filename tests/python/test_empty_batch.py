# SPDX-License-Identifier: Apache-2.0
"""Ranks without samples, and the strides of their tensors."""

import pytest
import torch
from rank_pool import RankPool
from torch import distributed

import normscope

pytestmark = pytest.mark.on_device

Tensors = dict[str, torch.Tensor]


IMAGES = torch.randn(2, 3, 8, 9)

EMPTY = {
    "batch": torch.empty(0, 3, 4, 5),
    "rows": torch.empty(2, 3, 0, 5),
    "columns": torch.empty(2, 3, 4, 0),
    "channels last": torch.empty(0, 3, 4, 5).to(memory_format=torch.channels_last).clone(),
    "rows, channels last": torch.empty(2, 3, 0, 5).to(memory_format=torch.channels_last).clone(),
    "cropped": IMAGES[:, :, 1:7, 1:7][:0],
    "cropped to nothing": IMAGES[:, :, 1:7, 4:4],
    "every other row": IMAGES[:, :, ::2, ::3][:0],
    "transposed": IMAGES.transpose(2, 3)[:0],
    "expanded": torch.empty(0, 3, 1, 1).expand(0, 3, 4, 5),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("training", [True, False])
def test_empty_outputs_have_the_strides_of_torch(kind: str, *, training: bool) -> None:
    strides = []
    # With a weight, torch multiplies, which makes other strides of those that are not dense.
    for layer in (normscope.BatchNorm2d(3, affine=False), torch.nn.BatchNorm2d(3, affine=False)):
        x = EMPTY[kind].detach().requires_grad_()
        y = layer.train(training)(x)
        y.sum().backward()
        assert x.grad is not None
        strides.append((y.stride(), x.grad.stride()))

    assert strides[0] == strides[1]


def train_on(kind: str, full: int) -> Tensors:
    """Train on an empty batch, and on another on one rank."""
    layer = normscope.BatchNormAct2d(3)
    x = IMAGES[:, :, 1:7, 1:7] if distributed.get_rank() == full else EMPTY[kind]
    x = x.detach().requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    return {"dx": x.grad, **layer.state_dict()}


@pytest.mark.parametrize("kind", EMPTY)
def test_an_empty_rank_takes_part_whatever_its_strides(ranks: RankPool, kind: str) -> None:
    answers = ranks.run(2, train_on, kind, 0)

    assert answers[1]["dx"].shape == EMPTY[kind].shape
    assert answers[0]["dx"].isfinite().all()
    for name in normscope.BatchNorm2d(3).state_dict():
        assert torch.equal(answers[0][name], answers[1][name])
