# SPDX-License-Identifier: Apache-2.0
"""The backward of eager layers under torch's compiled autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn
from torch._dynamo import compiled_autograd

import normscope

CHANNELS = 4


class WithResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = normscope.BatchNormAct2d(CHANNELS, activation="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, x.cos())  # type: ignore[no-any-return]


LAYERS: dict[str, Any] = {
    "plain": lambda: normscope.BatchNorm2d(CHANNELS),
    "without weight": lambda: normscope.BatchNorm2d(CHANNELS, affine=False),
    "activated": lambda: normscope.BatchNormAct2d(CHANNELS, activation="silu"),
    "with a residual": WithResidual,
    "slices": lambda: normscope.BatchNorm2d(CHANNELS, scope="slices:2"),
}


def gradients(name: str, *, compiles: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), LAYERS[name]())
    model.append(copy.deepcopy(model[1]))
    rank = distributed.get_rank()
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        if compiles:
            with compiled_autograd._enable(torch.compile(backend="eager")):
                model(x).sin().sum().backward()
        else:
            model(x).sin().sum().backward()
    torch._dynamo.reset()  # the number of graphs per function has a limit
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


def both(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return gradients(name, compiles=True), gradients(name, compiles=False)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_without_it(ranks: RankPool, name: str) -> None:
    for got, expected in ranks.run(2, both, name):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            # The backward of the convolution may add in another order: 1e-7 of its largest sums.
            allowed = 1e-5 * other.abs().amax().item()
            torch.testing.assert_close(one, other, rtol=0, atol=allowed)
