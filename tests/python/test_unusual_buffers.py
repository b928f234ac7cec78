# SPDX-License-Identifier: Apache-2.0
"""A count that is no integer, and strides for the function; test_programs.py has other buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import unchanged
from torch import nn
from torch.nn import functional

import normscope

pytestmark = pytest.mark.on_device

# A few dozen roundings of 1e-7, of numbers of order one.
TOLERANCE = 1e-5

AVERAGED = torch.tensor(2.5, dtype=torch.float64)  # as federated averaging makes it


def trained(layer: nn.Module, how: str) -> list[torch.Tensor]:
    run: nn.Module = layer
    if how == "compiled":
        run = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) + 5
    outputs = [run(x), run(x * 2)]
    return [y.detach() for y in outputs] + list(layer.buffers())


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.usefixtures("quiet_compiler")
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_whole_updates_are_averaged(momentum: float | None, how: str) -> None:
    layers = normscope.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
    layers[0].num_batches_tracked = AVERAGED.clone()
    layers[1].num_batches_tracked = AVERAGED.long()

    got, expected = trained(layers[0], how), trained(layers[1], "eager")

    assert torch.equal(got[-1], AVERAGED + 2)
    for ours, theirs in zip(got[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("which", range(4))
def test_the_function_takes_tensors_with_strides(which: int) -> None:
    x = torch.randn(6, 3)
    results = []
    functions: list[Any] = [functional.batch_norm, normscope.functional.batch_norm]
    for function in functions:
        tensors = [torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3)]
        tensors[which] = strided(tensors[which])
        results.append([function(x, *tensors, training=True), *tensors])

    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_a_call_that_raises_updates_none_of_them() -> None:
    layer = normscope.BatchNorm1d(3)
    layer.running_mean, layer.num_batches_tracked = strided(torch.zeros(3)), AVERAGED.clone()

    with unchanged(layer), pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1, 3))
