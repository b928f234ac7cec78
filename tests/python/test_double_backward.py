# SPDX-License-Identifier: Apache-2.0
"""Second gradients in lower precision, and third ones; test_programs.py has those in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import SUM_ROUNDINGS

import normscope

pytestmark = pytest.mark.on_device

Tensors = dict[str, torch.Tensor]


def step_of(shape: tuple[int, ...]) -> Tensors:
    """Return a batch, the gradient of its output, and the weights of the gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=generator, dtype=torch.float64)

    channels = shape[1]
    return {
        "x": normal(*shape) * 3 + 7,
        "dy": normal(*shape),
        "weight": normal(channels),
        "bias": normal(channels),
        "of_dx": normal(*shape),
        "of_dweight": normal(channels),
        "of_dbias": normal(channels),
    }


@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_once(dtype: torch.dtype) -> None:
    shape = (16, 3, 4, 5)
    step = {name: t.to(dtype) for name, t in step_of(shape).items()}
    expected, got = (
        torch_like(torch.nn.functional.batch_norm, {n: t.double() for n, t in step.items()}),
        torch_like(normscope.functional.batch_norm, step),
    )

    # The statistics have the error of sums in float32. A second gradient is a sum of about ten
    # terms, each with two or three statistics as factors.
    statistics = 30 * SUM_ROUNDINGS * torch.finfo(torch.float32).eps
    for value, want in zip(got, expected, strict=True):
        assert value.dtype == dtype
        allowed = statistics * want.abs().amax().item()
        stored = torch.finfo(dtype).eps
        torch.testing.assert_close(value.double(), want, rtol=stored, atol=allowed)


def torch_like(batch_norm: Any, step: Tensors) -> list[torch.Tensor]:
    x, dy, weight, bias = (
        step[name].clone().requires_grad_() for name in ("x", "dy", "weight", "bias")
    )
    y = batch_norm(x, None, None, weight, bias, training=True)
    gradients = torch.autograd.grad(y, [x, weight, bias], dy, create_graph=True)
    weights = (step["of_dx"], step["of_dweight"], step["of_dbias"])
    total = sum(((g * w).sum() for g, w in zip(gradients, weights, strict=True)), torch.zeros(()))
    return list(torch.autograd.grad(total, [dy, x, weight]))


@pytest.mark.own_kernels
def test_a_third_derivative_raises() -> None:
    layer = normscope.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    first = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    second = torch.autograd.grad(first[0].sin().sum(), x, create_graph=True)

    with pytest.raises(NotImplementedError, match="at most two differentiations, got a third"):
        second[0].sum().backward()
