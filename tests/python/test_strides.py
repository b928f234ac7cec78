# SPDX-License-Identifier: Apache-2.0
"""Inputs whose strides skip or repeat elements, or are in another order, and empty ones."""

from __future__ import annotations

import pytest
import torch
from oracle import LAYERS, OURS, results_of

pytestmark = pytest.mark.on_device

TABLE = torch.randn(8, 12)
SEQUENCES = torch.randn(8, 4, 6)
IMAGES = torch.randn(4, 3, 6, 8)
LAST = IMAGES.contiguous(memory_format=torch.channels_last)

INPUTS = {
    "every other channel": TABLE[:, ::2],
    "last position": SEQUENCES[:, :, -1],
    "one of two positions": SEQUENCES[:, :, ::3],
    "transposed": torch.randn(4, 8).t(),
    "transposed sequences": SEQUENCES.transpose(1, 2),
    "one channel of positions": SEQUENCES[:, :, :1].transpose(1, 2),
    "every other position of one channel": TABLE[:, None, ::2],
    "repeated": TABLE[:, :1, None].expand(8, 5, 3),
    "pooled and repeated": TABLE[:, :, None].expand(8, 12, 3),
    "one pixel": IMAGES[:, :, :1, 2:3],
    "one pixel, channels last": LAST[:, :, :1, 2:3],
    "one row": IMAGES[:, :, 1:2, ::2],
    "one row, channels last": LAST[:, :, 1:2, ::2],
    "window": IMAGES[:, :, 1:4, 2:6],
    "window, channels last": LAST[:, :, 1:4, 2:6],
    "every other channel, channels last": LAST[:, ::2],
    "flipped axes": IMAGES.permute(3, 1, 2, 0),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_any_strides_train_like_dense_ones(name: str, *, compiled: bool) -> None:
    x = INPUTS[name]
    layer, theirs = OURS[x.dim()](x.shape[1]), LAYERS[x.dim()](x.shape[1])
    if compiled:
        layer.compile(backend="aot_eager")

    got = results_of(layer, x)

    expected = results_of(theirs, x.clone(memory_format=torch.contiguous_format))
    torch.testing.assert_close(got, expected, check_stride=False)


EMPTY = {
    "batch": torch.empty(0, 3, 4, 5),
    "rows": torch.empty(2, 3, 0, 5),
    "columns": torch.empty(2, 3, 4, 0),
    "channels last": torch.empty(0, 3, 4, 5).to(memory_format=torch.channels_last).clone(),
    "rows, channels last": torch.empty(2, 3, 0, 5).to(memory_format=torch.channels_last).clone(),
    "cropped": IMAGES[:, :, 1:5, 1:7][:0],
    "cropped to nothing": IMAGES[:, :, 1:5, 4:4],
    "every other row": IMAGES[:, :, ::2, ::3][:0],
    "transposed": IMAGES.transpose(2, 3)[:0],
    "expanded": torch.empty(0, 3, 1, 1).expand(0, 3, 4, 5),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("training", [True, False])
def test_empty_outputs_have_the_strides_of_torch(kind: str, *, training: bool) -> None:
    strides = []
    for layers in (OURS, LAYERS):
        x = EMPTY[kind].detach().requires_grad_()
        # With a weight, torch multiplies, which makes other strides of those that are not dense.
        y = layers[4](3, affine=False).train(training)(x)
        y.sum().backward()
        assert x.grad is not None
        strides.append((y.stride(), x.grad.stride()))

    assert strides[0] == strides[1]
