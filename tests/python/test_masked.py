# SPDX-License-Identifier: Apache-2.0
"""Masks: the results of torch's layer, and the bits of normscope's, on the values that count."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from masked_network import rows_of
from oracle import OURS, results_of
from refusals import unchanged
from torch import nn

import normscope
from normscope.layers import SliceStats

pytestmark = pytest.mark.on_device

# For a few hundred entries of order one in float64: eps 2e-16 times some hundred roundings.
ROUNDING = 1e-12

SHAPES = [(9, 3), (6, 3, 8), (6, 3, 5, 4), (6, 3, 2, 3, 2)]
TRASH = (float("nan"), float("inf"), -float("inf"), 1e30)

Tensors = dict[str, torch.Tensor]


def masked_input(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input far from zero, and a mask of about half of it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 5
    mask = torch.rand(shape[0], 1, *shape[2:], generator=generator) > 0.5
    return x.to(dtype), mask


def with_trash(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Replace the masked values by values that would be visible in the results."""
    trash = torch.tensor(TRASH, dtype=x.dtype).repeat(x.numel())[: x.numel()]
    return torch.where(mask, x, trash.view(x.shape))


def assert_as_on_rows(got: Tensors, rows: Tensors, mask: torch.Tensor, *, bits: bool) -> None:
    """Assert that a step agrees with one on the rows, and is zero elsewhere."""
    for name, value in got.items():
        wanted = rows[name]
        if name in ("y", "dx"):
            assert value[~mask.expand_as(value)].count_nonzero() == 0
            value = rows_of(value, mask)
        if bits:
            assert torch.equal(value, wanted), name
        else:
            torch.testing.assert_close(value, wanted, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_step_has_the_bits_of_one_on_the_rows(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, mask = masked_input(shape, dtype)
    layer = OURS[len(shape)](3, dtype=torch.float64 if dtype == torch.float64 else None)
    alone = normscope.BatchNorm(3, dtype=layer.weight.dtype)

    expected = results_of(alone, rows_of(x, mask))

    assert_as_on_rows(results_of(layer, with_trash(x, mask), mask=mask), expected, mask, bits=True)
    assert layer.elements_seen == 3 * int(mask.sum())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_y_and_dx_keep_the_memory_format(layout: torch.memory_format, *, training: bool) -> None:
    x, mask = masked_input((6, 3, 5, 4))
    x = x.to(memory_format=layout)
    layer = normscope.BatchNorm2d(3, dtype=torch.float64).train(training)

    got = results_of(layer, x, mask=mask)

    assert got["y"].stride() == got["dx"].stride() == x.stride()


@pytest.mark.parametrize("scope", ["local", "slices:2", "norm_batch:2"])
def test_one_value_raises_and_updates_nothing(scope: str) -> None:
    x, mask = masked_input((4, 3, 5, 4))
    mask[-2:] = False
    mask[-1, 0, 0, 0] = True
    if scope == "local":
        mask[:2] = False
    for slice_stats in get_args(SliceStats):
        layer = normscope.BatchNorm2d(3, scope=scope, slice_stats=slice_stats, dtype=torch.float64)

        with unchanged(layer), pytest.raises(ValueError, match="Expected more than 1 value per"):
            layer(x, mask=mask)


def test_slices_are_of_samples_however_many_values_are_masked() -> None:
    x, mask = masked_input((4, 3, 5, 4))

    def call(scope: str) -> torch.Tensor:
        return normscope.functional.batch_norm(x, None, None, training=True, scope=scope, mask=mask)

    assert torch.equal(call(f"slices:{2**62}"), call("slices:4"))
    assert torch.equal(call("norm_batch:2"), call("slices:2"))


def test_a_lazy_layer_takes_its_channels_from_a_masked_input() -> None:
    x, mask = masked_input((4, 3, 5, 4), torch.float32)
    layer: Any = normscope.convert(nn.LazyBatchNorm2d(), scope="local")

    y = layer(x, mask=mask)

    assert type(layer) is normscope.BatchNorm2d
    assert torch.equal(y, normscope.BatchNorm2d(3, scope="local")(x, mask=mask))
