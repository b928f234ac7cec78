# SPDX-License-Identifier: Apache-2.0
"""A network that takes a mask."""

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
