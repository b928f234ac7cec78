# SPDX-License-Identifier: Apache-2.0
"""A network that takes a mask, and what a mask selects."""

import torch
from torch import nn


class Masked(nn.Module):
    """A layer whose mask is an input of the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x, mask=mask)
        return y.relu()


def rows_of(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the positions of x [N, C, *] where the mask is True, as rows [M, C]."""
    return x.movedim(1, -1)[mask.squeeze(1)]
