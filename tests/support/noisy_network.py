# SPDX-License-Identifier: Apache-2.0
"""A small network whose two layers have many and few values, with inputs for it."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

import normscope

Network = TypeVar("Network", bound=nn.Module)

BATCHES = 8

# More than recommend_scopes asks of a layer that has trained.
UPDATES = 100


def small_network() -> nn.Sequential:
    """The first layer normalizes 64 positions of noise per image, the last one a single value."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
    )
    normscope.convert(network, "local")
    return trained(network)


def trained(network: Network) -> Network:
    """Return the network, whose layers claim to have had training steps."""
    for layer in network.modules():
        if isinstance(layer, normscope.BatchNorm) and layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(UPDATES)
    return network


def noise_batches(samples: int, count: int = BATCHES) -> list[torch.Tensor]:
    """Return the same batches at each call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 3, 8, 8, generator=generator) for _ in range(count)]
