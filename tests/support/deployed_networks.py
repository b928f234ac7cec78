# SPDX-License-Identifier: Apache-2.0
"""What the tests of deployed networks share: their inputs, their state and their tolerance."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# Sums of at most 72 products of order ten, in a different order: a few dozen roundings in float32.
ABSOLUTE = 72 * 10 * 6e-8


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module) -> nn.Module:
    """Give the model non-initial parameters and running statistics; return it in evaluation."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5, generator)
            nn.init.normal_(module.bias, generator=generator)
    for seed in range(3):
        model(batch(seed))
    return model.eval()


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)
