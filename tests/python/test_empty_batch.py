# SPDX-License-Identifier: Apache-2.0
"""The strides of empty outputs; test_programs.py has what ranks without samples compute."""

import pytest
import torch

import normscope

pytestmark = pytest.mark.on_device

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
