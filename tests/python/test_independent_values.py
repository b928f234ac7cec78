# SPDX-License-Identifier: Apache-2.0
"""The number of independent values of a norm batch, estimated from the moments of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import pytest
import torch

from normscope.scopes import PartMoments, independent_values

EPS = 1e-5
BATCHES = 8


def _values(make: Callable[[], torch.Tensor], parts: int, batches: int = BATCHES) -> float:
    """Return the mean of many estimates, each from several batches."""
    estimates = []
    for _ in range(20):
        moments = PartMoments.of(make(), parts)
        for _ in range(batches - 1):
            moments = moments.followed_by(PartMoments.of(make(), parts))
        values = independent_values(moments, EPS)
        assert values is not None
        estimates.append(values.value)
    return sum(estimates) / len(estimates)


# The mean of 20 estimates, each from 64 channels, 4 parts and 8 batches, is accurate to one or two
# percent; the bias of the estimator is about 1/32.
@pytest.mark.parametrize("values", [2, 4, 16])
def test_independent_normal_values_are_counted(values: int) -> None:
    torch.manual_seed(0)

    worth = _values(lambda: 3 + 2 * torch.randn(4 * values, 64), parts=4)

    assert worth == pytest.approx(values, rel=0.06)


def test_values_that_are_repeated_count_once() -> None:
    torch.manual_seed(0)

    worth = _values(lambda: torch.randn(16, 64, 1).expand(-1, -1, 9), parts=4)

    assert worth == pytest.approx(4, rel=0.06)


def test_images_with_different_constants_are_worth_few_values() -> None:
    torch.manual_seed(0)

    # Half of the variance is between images. The other half, over 100 positions per image, has
    # almost no error. q / V has the variance 2 (1/2)^2 / n for n images.
    worth = _values(lambda: torch.randn(16, 64, 1) + torch.randn(16, 64, 100), parts=4)

    assert worth == pytest.approx(16, rel=0.1)


def test_the_number_grows_with_the_width_of_a_part() -> None:
    torch.manual_seed(0)
    moments = PartMoments.of(torch.randn(32 * 8, 256), 64)

    one, four = (independent_values(moments, EPS, size) for size in (1, 4))

    assert one is not None
    assert four is not None
    assert four.value / one.value == pytest.approx(4, rel=0.15)


def test_uneven_and_empty_parts_count_by_their_size() -> None:
    torch.manual_seed(0)
    sizes = [2, 6, 0, 8]
    estimates = []
    for _ in range(40):
        rows = []
        for _ in range(BATCHES):
            of_parts = [PartMoments.of(torch.randn(size, 64)) for size in sizes]
            rows.append(reduce(PartMoments.beside, of_parts))
        moments = rows[0]
        for row in rows[1:]:
            moments = moments.followed_by(row)
        values = independent_values(moments, EPS)
        assert values is not None
        estimates.append(values.value)

    # There are 16 values in three parts.
    assert sum(estimates) / len(estimates) == pytest.approx(16 / 3, rel=0.08)


def test_a_channel_without_variance_is_ignored() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 2)

    with_constant = independent_values(PartMoments.of(torch.cat([x, torch.ones(16, 1)], 1), 4), EPS)
    constant = independent_values(PartMoments.of(torch.ones(16, 1), 4), EPS)

    without_constant = independent_values(PartMoments.of(x, 4), EPS)

    assert with_constant is not None
    assert without_constant is not None
    assert constant is not None
    assert math.isclose(with_constant.value, without_constant.value)
    assert math.isinf(constant.value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "expanded"])
def test_moments_are_those_of_the_elements(dtype: torch.dtype, layout: str) -> None:
    torch.manual_seed(0)
    x = (1 + torch.randn(5, 3, 4, 6)).to(dtype)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(2, 3)
    elif layout == "expanded":
        x = x[:, :, :1].expand(-1, -1, 4, -1)

    rows = PartMoments.of(x, 2).rows

    for row, part in zip(rows[0], x.double().tensor_split(2), strict=True):
        of_channels = part.transpose(0, 1).flatten(1)
        mean, var = row[1:].chunk(2)
        assert row[0] == of_channels.shape[1]
        # Sums in float32 about a pivot, with at most 37 roundings.
        torch.testing.assert_close(mean, of_channels.mean(1), rtol=0, atol=1e-5)
        torch.testing.assert_close(var, of_channels.var(1, correction=0), rtol=0, atol=1e-4)
