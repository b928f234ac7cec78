# SPDX-License-Identifier: Apache-2.0
"""The backward of eager layers under torch's compiled autograd."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn
from torch._dynamo import compiled_autograd

import normscope

pytestmark = pytest.mark.portable

CHANNELS = 4


class WithResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = normscope.BatchNormAct2d(CHANNELS, activation="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, x.cos())  # type: ignore[no-any-return]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3),
        normscope.BatchNorm2d(CHANNELS),
        normscope.BatchNorm2d(CHANNELS),
        normscope.BatchNorm2d(CHANNELS, affine=False),
        normscope.BatchNormAct2d(CHANNELS, activation="silu"),
        WithResidual(),
        normscope.BatchNorm2d(CHANNELS, scope="slices:2"),
    )


def gradients(*, compiles: bool) -> list[torch.Tensor]:
    model = network()
    rank = distributed.get_rank()
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    compiler = torch.compile(backend="eager")
    for _ in range(2):  # the second time with the graph of the first
        model.zero_grad()
        if compiles:
            with compiled_autograd._enable(compiler):
                model(x).sin().sum().backward()
        else:
            model(x).sin().sum().backward()
    torch._dynamo.reset()  # the number of graphs per function has a limit
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


def both() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return gradients(compiles=True), gradients(compiles=False)


def test_gradients_are_those_without_it(ranks: RankPool) -> None:
    for got, expected in ranks.run(2, both):
        assert len(got) == len(list(network().parameters()))
        for one, other in zip(got, expected, strict=True):
            # The backward of the convolution may add in another order: 1e-7 of its largest sums.
            allowed = 1e-5 * other.abs().amax().item()
            torch.testing.assert_close(one, other, rtol=0, atol=allowed)
