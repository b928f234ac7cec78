# SPDX-License-Identifier: Apache-2.0
"""Inputs at the ends of the range of float32; test_scope_properties.py has those of every dtype."""

from collections.abc import Callable

import pytest
import torch
from oracle import bounds, layer_for, oracle_of, step

import normscope

pytestmark = pytest.mark.on_device


HALF_THE_RANGE = 2.0**127


def smallest_denormal(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def spread_evenly(shape: tuple[int, ...], largest: float) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * 2 - 1) * largest


def one_against_all(shape: tuple[int, ...], largest: float) -> torch.Tensor:
    """Return an input with one element at the largest possible distance from the mean."""
    x = torch.full(shape, largest, dtype=torch.float64)
    x[1, :, 2, 3] = -largest
    return x


Huge = Callable[[tuple[int, ...], float], torch.Tensor]


def assert_huge_as_oracle(x: torch.Tensor, where: torch.Tensor) -> None:
    """Check y and dx of some elements. The variance of 1e76 does not fit into a float32 buffer."""
    layer = layer_for(x.dim(), x.shape[1])
    layer.momentum = 0.0
    dy = torch.randn(x.shape).to(x.dtype)
    expected = step(oracle_of(layer, 4), x.double(), dy.double())
    allowed = bounds(x, dy, layer, expected)

    got = step(layer, x, dy)

    assert ((got.y - expected.y).abs() <= allowed["y"])[where].all()
    # scale, slope and dx are denormal: they are rounded to a multiple of the smallest denormal.
    factors = 2 + dy.double().abs().amax() * (1 + expected.y.abs())
    roundings = smallest_denormal(torch.float32) * factors + smallest_denormal(x.dtype)
    assert ((got.dx - expected.dx).abs() <= allowed["dx"] + roundings)[where].all()


@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("build", [spread_evenly, one_against_all])
def test_inputs_up_to_half_of_the_float32_range_are_as_accurate_as_others(
    dtype: torch.dtype, layout: torch.memory_format, build: Huge
) -> None:
    largest = HALF_THE_RANGE * (1 - torch.finfo(dtype).eps / 2)
    x = build((4, 3, 16, 17), largest).to(dtype).to(memory_format=layout)
    assert x.abs().amax().item() < HALF_THE_RANGE

    assert_huge_as_oracle(x, torch.ones_like(x, dtype=torch.bool))


@pytest.mark.own_kernels
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("others", [0.0, 5e36, 5e37, 3e38])
def test_only_a_deviation_beyond_the_float32_range_becomes_infinite(
    others: float, layout: torch.memory_format
) -> None:
    x = torch.rand(2, 3, 8, 8) * (0.1 * others + 1e35) + others
    x[0, 0, 0, 0] = -3.33e38
    deviation = x.double() - x.double().mean((0, 2, 3), keepdim=True)
    too_large = deviation.abs() > torch.finfo(torch.float32).max
    assert too_large.sum() == (others > 1e37)

    x = x.to(memory_format=layout)
    y = layer_for(x.dim(), x.shape[1])(x)

    assert torch.equal(y == -torch.inf, too_large)
    assert torch.equal(y.isfinite(), ~too_large)
    assert_huge_as_oracle(x, ~too_large)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_affect_only_their_channel(bad: float) -> None:
    x = torch.randn(3, 2, 4, 4)
    x[1, 0, 2, 3] = bad
    layer = normscope.BatchNorm2d(2)

    y = layer(x)

    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()
    assert layer.running_mean is not None
    assert layer.running_mean.isfinite().tolist() == [False, True]
