# SPDX-License-Identifier: Apache-2.0
"""Every dtype and layout agrees with torch's layer in float64, within derived error bounds."""

from collections.abc import Callable

import pytest
import torch
from oracle import assert_within, bounds, layer_for, oracle_of, step

import normscope

pytestmark = pytest.mark.on_device

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

SHAPES = [(7, 3), (65, 5), (4, 3, 31), (3, 4, 8, 9), (2, 33, 7, 7), (2, 3, 65, 64), (2, 3, 4, 5, 6)]


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


def channels_last(x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 4:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.to(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", [contiguous, channels_last])
def test_every_dtype_and_layout_is_as_accurate_as_its_arithmetic(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = layout((torch.randn(shape) * 2 + 1).to(dtype))
    dy = torch.randn(shape).to(dtype)
    layer = layer_for(x.dim(), x.shape[1])
    expected = step(oracle_of(layer, x.dim()), x.double(), dy.double())
    allowed = bounds(x, dy, layer, expected)

    got = step(layer, x, dy)

    assert_within(got, expected, allowed)
    if x.dim() > 3:  # in a memory format
        assert got.y.stride() == got.dx.stride() == x.stride()


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
@pytest.mark.parametrize("layout", [contiguous, channels_last])
@pytest.mark.parametrize("build", [spread_evenly, one_against_all])
def test_inputs_up_to_half_of_the_float32_range_are_as_accurate_as_others(
    dtype: torch.dtype, layout: Callable[[torch.Tensor], torch.Tensor], build: Huge
) -> None:
    largest = HALF_THE_RANGE * (1 - torch.finfo(dtype).eps / 2)
    x = layout(build((4, 3, 16, 17), largest).to(dtype))
    assert x.abs().amax().item() < HALF_THE_RANGE

    assert_huge_as_oracle(x, torch.ones_like(x, dtype=torch.bool))


@pytest.mark.own_kernels
@pytest.mark.parametrize("layout", [contiguous, channels_last])
@pytest.mark.parametrize("others", [0.0, 5e36, 5e37, 3e38])
def test_only_a_deviation_beyond_the_float32_range_becomes_infinite(
    others: float, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x = torch.rand(2, 3, 8, 8) * (0.1 * others + 1e35) + others
    x[0, 0, 0, 0] = -3.33e38
    deviation = x.double() - x.double().mean((0, 2, 3), keepdim=True)
    too_large = deviation.abs() > torch.finfo(torch.float32).max
    assert too_large.sum() == (others > 1e37)

    y = layer_for(x.dim(), x.shape[1])(layout(x))

    assert torch.equal(y == -torch.inf, too_large)
    assert torch.equal(y.isfinite(), ~too_large)
    assert_huge_as_oracle(layout(x), ~too_large)


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
