# SPDX-License-Identifier: Apache-2.0
"""The layers of both libraries, torch's in float64, and the tolerances of a comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

import normscope

LAYERS: dict[int, type[_BatchNorm]] = {
    2: torch.nn.BatchNorm1d,
    3: torch.nn.BatchNorm1d,
    4: torch.nn.BatchNorm2d,
    5: torch.nn.BatchNorm3d,
}
OURS: dict[int, type[normscope.BatchNorm]] = {
    2: normscope.BatchNorm1d,
    3: normscope.BatchNorm1d,
    4: normscope.BatchNorm2d,
    5: normscope.BatchNorm3d,
}
ACTIVATED: dict[int, type[normscope.BatchNormAct]] = {
    2: normscope.BatchNormAct1d,
    3: normscope.BatchNormAct1d,
    4: normscope.BatchNormAct2d,
    5: normscope.BatchNormAct3d,
}

IS_TORCH_2_11 = torch.__version__.startswith("2.11.")
needs_bias_argument = pytest.mark.skipif(
    IS_TORCH_2_11, reason="torch 2.11: its layers have no argument bias"
)

# Worst-case numbers of roundings in the arithmetic type. The sum of a tile is a chain of at most 32
# additions and a fold of 6; its terms have 2 roundings. Everything after that is rounded once per
# operation.
SUM_ROUNDINGS = 40
APPLY_ROUNDINGS = 8


@dataclass(frozen=True)
class Answers:
    """The results of a training step of one layer, all in float64."""

    y: torch.Tensor
    dx: torch.Tensor
    dweight: torch.Tensor
    dbias: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor


def layer_for(dims: int, channels: int, **keywords: Any) -> normscope.BatchNorm:
    """Return a layer for inputs of some dimensions, with other parameters for each channel."""
    layer = OURS[dims](channels, **keywords)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 1.5, channels))
        layer.weight[1::2] *= -1
        layer.bias.copy_(torch.linspace(-1, 1, channels))
    return layer


def arithmetic_epsilon(dtype: torch.dtype) -> float:
    """Return the epsilon of the type in which inputs of ``dtype`` are computed."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def results_of(
    layer: torch.nn.Module,
    *inputs: torch.Tensor,
    dy: torch.Tensor | None = None,
    call: Callable[..., torch.Tensor] | None = None,
    **keywords: Any,
) -> dict[str, torch.Tensor]:
    """Run a forward and a backward; return y, its gradients "dx" and so on, and the layer's state.

    Args:
        layer: The layer.
        *inputs: x, and a residual if there is one.
        dy: The gradient of y; None for y's sine.
        call: What runs the layer; None for the layer itself.
        **keywords: Further arguments of the call.
    """
    names = ("x", "residual")[: len(inputs)]
    given = {name: x.detach().requires_grad_() for name, x in zip(names, inputs, strict=True)}
    y = (layer if call is None else call)(*given.values(), **keywords)
    assert y.dtype == given["x"].dtype or "residual" in given
    dy = y.detach().double().sin().to(y.dtype) if dy is None else dy
    wanted = {**given, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(y, list(wanted.values()), dy)
    named = {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}
    return {"y": y.detach(), **named, **copy.deepcopy(layer.state_dict())}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that results have the same names, dtypes and bits."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value), name


def step(layer: _BatchNorm, x: torch.Tensor, dy: torch.Tensor) -> Answers:
    """Run a forward and a backward of ``layer``."""
    found = results_of(layer, x, dy=dy)
    return Answers(**{field.name: found[field.name].double() for field in fields(Answers)})


def oracle_of(layer: _BatchNorm, dim: int) -> _BatchNorm:
    """Return torch's layer with the state of ``layer``, in float64."""
    oracle = LAYERS[dim](layer.num_features, eps=layer.eps, momentum=layer.momentum)
    oracle.load_state_dict(layer.state_dict())
    return oracle.double()


def bounds(
    x: torch.Tensor, dy: torch.Tensor, layer: _BatchNorm, expected: Answers
) -> Mapping[str, torch.Tensor]:
    """Return the allowed difference of each answer from the oracle's, elementwise.

    Let u be a rounding of the arithmetic, and mean(|x - pivot|) at most a few standard deviations.
    Then the mean is off by at most SUM_ROUNDINGS * u standard deviations, the variance by a factor
    of SUM_ROUNDINGS * u, and inv_std by half of that. The offset of the input does not matter,
    because means are stored as pairs. Stored results are rounded to the dtype of their tensor.
    The oracle does not store its mean as a pair, so its rounding is allowed for too.
    """
    u = arithmetic_epsilon(x.dtype)
    stored = torch.finfo(x.dtype).eps
    kept = torch.finfo(layer.weight.dtype).eps
    x, dy = x.double(), dy.double()
    over = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)

    var, mean = torch.var_mean(x, over, correction=0)
    inv_std = (var + layer.eps).rsqrt().view(shape)
    weight = layer.weight.detach().double().view(shape).abs()
    bias = layer.bias.detach().double().view(shape).abs()
    xhat = ((x - mean.view(shape)) * inv_std).abs()
    mean_dy = dy.abs().mean(over, keepdim=True)
    mean_dy_xhat = (dy.abs() * (1 + xhat)).mean(over, keepdim=True)
    count = x.numel() / x.shape[1]
    # In standard deviations.
    mean_of_oracle = 2 * torch.finfo(torch.float64).eps * mean.abs().view(shape) * inv_std

    apply = APPLY_ROUNDINGS * u
    sums = SUM_ROUNDINGS * u
    spread = dy.abs() + mean_dy + (1 + xhat) * mean_dy_xhat
    return {
        "y": (sums + apply) * (weight * (1 + xhat) + bias)
        + weight * mean_of_oracle
        + stored * expected.y.abs(),
        "dx": (3 * (sums + apply) + mean_of_oracle) * weight * inv_std * spread
        + stored * expected.dx.abs(),
        "dweight": (3 * (sums + apply) + mean_of_oracle.flatten()) * count * mean_dy_xhat.flatten()
        + kept * expected.dweight.abs(),
        "dbias": (sums + apply) * count * mean_dy.flatten() + kept * expected.dbias.abs(),
        "running_mean": sums * var.sqrt() + 4 * kept * (mean.abs() + expected.running_mean.abs()),
        "running_var": 2 * sums * var + 4 * kept * expected.running_var.abs(),
    }


def assert_within(got: Answers, expected: Answers, allowed: Mapping[str, torch.Tensor]) -> None:
    """Assert that every answer differs from the expected one by at most ``allowed``."""
    for name, bound in allowed.items():
        error = (getattr(got, name) - getattr(expected, name)).abs()
        excess = (error - bound).amax().item() if error.numel() else 0.0
        assert excess <= 0, f"{name} exceeds its bound by {excess}"
