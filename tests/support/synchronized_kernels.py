# SPDX-License-Identifier: Apache-2.0
"""The kernels of torch's synchronized layer, which torch has on devices only, for the CPU.

Written from the formulas; arguments and results are torch's.
"""

from __future__ import annotations

import os
from typing import Any

import torch

WANTED = os.environ.get("NORMSCOPE_TEST_KERNELS") == "synchronized"


def _other_dims(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    var, mean = torch.var_mean(_wide(x), _other_dims(x), correction=0)
    return mean, (var + eps).rsqrt()


def _gather_stats_with_counts(
    x: torch.Tensor,
    means: torch.Tensor,
    inv_stds: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert means.shape == inv_stds.shape == (counts.numel(), x.shape[1])
    # CUDA's kernel reads the counts in this dtype, and means in the wider one.
    assert counts.dtype == (x.dtype if running_mean is None else running_mean.dtype)
    assert means.dtype == inv_stds.dtype == _wide(counts).dtype
    total = torch.zeros((), dtype=means.dtype)
    mean = torch.zeros_like(means[0])
    squares = torch.zeros_like(mean)  # of the distances from the mean
    for of_rank, inv_std, count in zip(means, inv_stds, counts, strict=True):
        distance = of_rank - mean
        both = total + count
        squares += (inv_std**-2 - eps) * count + distance**2 * total * count / both
        mean = mean + distance * count / both
        total = both
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(squares / (total - 1), momentum)
    return mean, (squares / total + eps).rsqrt()


def _elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    del eps
    y = (_wide(x) - _along_channels(mean, x)) * _along_channels(inv_std, x)
    if weight is not None:
        y = y * _along_channels(weight, x)
    if bias is not None:
        y = y + _along_channels(bias, x)
    return y.to(x.dtype)


def _elemt_out(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_elemt(*arguments))


def _backward_reduce(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,  # noqa: FBT001 - torch's signature
    weight_g: bool,  # noqa: FBT001
    bias_g: bool,  # noqa: FBT001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    del weight, input_g, weight_g, bias_g
    dy = _wide(dy)
    sum_dy = dy.sum(_other_dims(x))
    sum_dy_xmu = (dy * (_wide(x) - _along_channels(mean, x))).sum(_other_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * inv_std, sum_dy.clone()


def _backward_elemt(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    inv_std: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    assert counts.dtype == torch.int32
    total = counts.sum()
    slope = inv_std**2 * sum_dy_xmu / total
    scale = inv_std if weight is None else inv_std * weight
    centered = _wide(x) - _along_channels(mean, x)
    dx = _wide(dy) - _along_channels(sum_dy / total, x) - centered * _along_channels(slope, x)
    return (dx * _along_channels(scale, x)).to(x.dtype)


def register(device: str = "CPU") -> torch.library.Library:
    """Register the kernels for the lifetime of the returned object."""
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("batch_norm_stats", _stats, device)
    kernels.impl("batch_norm_gather_stats_with_counts", _gather_stats_with_counts, device)
    kernels.impl("batch_norm_elemt", _elemt, device)
    kernels.impl("batch_norm_elemt.out", _elemt_out, device)
    kernels.impl("batch_norm_backward_reduce", _backward_reduce, device)
    kernels.impl("batch_norm_backward_elemt", _backward_elemt, device)
    return kernels


if WANTED:
    KERNELS = register()
