# SPDX-License-Identifier: Apache-2.0
"""The number of independent values of a norm batch, estimated from the moments of its parts."""

from __future__ import annotations

import pytest
import torch

from normscope.scopes import PartMoments, independent_values

EPS = 1e-5


def test_the_values_of_parts_and_of_parts_joined_are_counted() -> None:
    moments = PartMoments.of(torch.randn(32 * 8, 256), 64)
    for _ in range(3):
        moments = moments.followed_by(PartMoments.of(torch.randn(32 * 8, 256), 64))

    one, four = (independent_values(moments, EPS, size) for size in (1, 4))

    assert one is not None
    assert four is not None
    # Four batches of 64 or 16 parts: the bias is below 1/64, and the error smaller.
    assert one.value == pytest.approx(4, rel=0.06)
    assert four.value == pytest.approx(16, rel=0.06)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "expanded"])
def test_moments_are_those_of_the_elements(dtype: torch.dtype, layout: str) -> None:
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
