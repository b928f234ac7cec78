# SPDX-License-Identifier: Apache-2.0
"""Norm batches within a rank, by torch's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import arithmetic_epsilon
from rank_pool import RankPool
from torch.utils.checkpoint import checkpoint

import normscope

SLICES = 2


@pytest.fixture
def pool(pools: dict[str, RankPool]) -> RankPool:
    """Ranks whose tensors torch's kernels normalize."""
    return pools["native"]


def normalize(x: torch.Tensor, mask: torch.Tensor | None, settings: dict[str, Any]) -> torch.Tensor:
    layer = normscope.BatchNorm2d(x.shape[1], scope=f"slices:{SLICES}", **settings)
    y: torch.Tensor = layer(x, mask=mask)
    return y.detach()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"track_running_stats": False},
        {"slice_stats": "pooled"},
        {"slice_stats": "first"},
        {"slice_stats": "sequential"},
    ],
)
def test_statistics_of_every_slice_are_as_wide_as_float32(
    pool: RankPool, dtype: torch.dtype, settings: dict[str, Any], *, affine: bool, masked: bool
) -> None:
    mean = 10
    x = (torch.randn(8, 3, 16, 16) + mean).to(dtype)
    mask = torch.ones_like(x[:, :1], dtype=torch.bool) if masked else None

    [y] = pool.run(1, normalize, x, mask, {"affine": affine, **settings})

    slices = x.double().chunk(SLICES)
    expected = torch.cat([(s - s.mean((0, 2, 3), keepdim=True)) for s in slices])
    expected /= torch.cat(
        [s.var((0, 2, 3), correction=0, keepdim=True).add(1e-5).sqrt().expand_as(s) for s in slices]
    )
    # The mean has the roundings of one that is `mean` standard deviations from 0.
    of_statistics = 64 * mean * arithmetic_epsilon(dtype)
    stored = torch.finfo(dtype).eps * expected.abs()
    assert ((y.double() - expected).abs() <= of_statistics + stored).all()


def recompute(momentum: float | None) -> tuple[list[Any], list[Any]]:
    """Return the buffers after a forward of a batch with infinity, and after its backward."""
    layer = normscope.BatchNorm1d(3, scope="local", momentum=momentum)
    x = torch.randn(4, 3)
    x[0, 0] = float("inf")
    y = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    before = [buffer.tolist() for buffer in layer.buffers()]
    y.sum().backward()
    return before, [buffer.tolist() for buffer in layer.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_recomputation_leaves_infinite_running_statistics(
    pool: RankPool, momentum: float | None
) -> None:
    [(before, after)] = pool.run(1, recompute, momentum)

    assert before[0][0] == float("inf")
    assert str(after) == str(before)  # NaN differs from itself
