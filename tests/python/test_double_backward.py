# SPDX-License-Identifier: Apache-2.0
"""Second gradients agree with torch on the joined batch, and with finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import SUM_ROUNDINGS
from rank_pool import RankPool, error_of, split_of
from torch import distributed

import normscope
from normscope.layers import Activation

pytestmark = pytest.mark.on_device

# Relative to the largest entry. Both sides compute in float64 (eps 2e-16), condition number one.
RELATIVE = 1e-10

Tensors = dict[str, torch.Tensor]


def step_of(shape: tuple[int, ...], ranks: int) -> Tensors:
    """Return the joined batch, the gradient of its output, and the weights of the gradients."""
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
        "of_dweight": normal(ranks, channels),
        "of_dbias": normal(ranks, channels),
    }


def second_gradients(
    gradients: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...], of: list[torch.Tensor]
) -> list[torch.Tensor]:
    total = sum(((g * w).sum() for g, w in zip(gradients, weights, strict=True)), torch.zeros(()))
    return list(torch.autograd.grad(total, of))


def second_gradients_of_rank(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    affine: bool,  # noqa: FBT001
    last: bool,  # noqa: FBT001
) -> tuple[list[torch.Tensor], int]:
    rank = distributed.get_rank()
    part = split_of(sizes, rank)
    step = step_of(shape, len(sizes))
    layer = normscope.BatchNorm(shape[1], affine=affine, dtype=torch.float64)
    if affine:
        layer.load_state_dict({name: step[name] for name in ("weight", "bias")}, strict=False)
    x, dy = step["x"][part].requires_grad_(), step["dy"][part].requires_grad_()
    before = normscope.training.communication_counters().calls
    y = layer(x.contiguous(memory_format=torch.channels_last) if last else x)
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], dy, create_graph=True)
    weights = (step["of_dx"][part], step["of_dweight"][rank], step["of_dbias"][rank])
    of = [dy, x, layer.weight] if affine else [dy, x]
    seen = second_gradients(gradients, weights[: len(gradients)], of)
    return seen, normscope.training.communication_counters().calls - before


def second_gradients_of_torch(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    affine: bool,  # noqa: FBT001
) -> list[torch.Tensor]:
    """Compute them on the joined batch, with separate parameters for each rank's samples."""
    ranks = len(sizes)
    step = step_of(shape, ranks)
    x, dy = step["x"].requires_grad_(), step["dy"].requires_grad_()
    rank_of_sample = torch.arange(ranks).repeat_interleave(torch.tensor(sizes))
    per_sample = (shape[0], shape[1], *(1 for _ in shape[2:]))
    weight, bias = (step[n].expand(ranks, -1).clone().requires_grad_() for n in ("weight", "bias"))
    y = torch.nn.functional.batch_norm(x, None, None, training=True)
    if affine:
        y = y * weight[rank_of_sample].view(per_sample) + bias[rank_of_sample].view(per_sample)
    inputs = [x, weight, bias] if affine else [x]
    gradients = torch.autograd.grad(y, inputs, dy, create_graph=True)
    weights = (step["of_dx"], step["of_dweight"], step["of_dbias"])
    of = [dy, x, weight] if affine else [dy, x]
    return second_gradients(gradients, weights[: len(gradients)], of)


@pytest.mark.parametrize(
    ("sizes", "extent", "affine", "last"),
    [
        ((5, 2), (4, 5), True, False),
        ((2, 5), (4, 5), True, True),
        ((0, 3, 4), (6,), True, False),
        ((3, 4), (), False, False),
        ((1, 2, 3), (2, 3, 4), True, False),
    ],
)
def test_second_gradients_are_those_of_torch_on_the_joined_batch(
    ranks: RankPool,
    sizes: tuple[int, ...],
    extent: tuple[int, ...],
    affine: bool,  # noqa: FBT001
    last: bool,  # noqa: FBT001
) -> None:
    shape = (sum(sizes), 3, *extent)
    expected = second_gradients_of_torch(shape, sizes, affine)

    answers = ranks.run(len(sizes), second_gradients_of_rank, shape, sizes, affine, last)

    for rank, (got, calls) in enumerate(answers):
        assert calls == 3  # forward, backward, double backward
        part = split_of(sizes, rank)
        wanted = [expected[0][part], expected[1][part], *(e[rank] for e in expected[2:])]
        for value, want, whole in zip(got, wanted, expected, strict=True):
            allowed = RELATIVE * whole.abs().amax().item()
            torch.testing.assert_close(value, want, rtol=0, atol=allowed)


@pytest.mark.parametrize("scope", ["local", "slices:3"])
@pytest.mark.parametrize("affine", [True, False])
def test_second_gradients_agree_with_finite_differences(scope: str, affine: bool) -> None:  # noqa: FBT001
    step = step_of((5, 2, 2), 1)
    names = ["x", "weight", "bias"] if affine else ["x"]

    def batch_norm(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        weight, bias = parameters or (None, None)
        return normscope.functional.batch_norm(
            x, None, None, weight, bias, training=True, scope=scope
        )

    assert torch.autograd.gradgradcheck(batch_norm, [step[n].requires_grad_() for n in names])


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.nn.functional.relu,
    "relu6": torch.nn.functional.relu6,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "silu": torch.nn.functional.silu,
    "hard_swish": torch.nn.functional.hardswish,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("without", [[], ["weight", "bias"], ["bias"]], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_second_gradients_of_an_activation_are_those_of_torch(
    activation: Activation,
    without: list[str],
    has_residual: bool,  # noqa: FBT001
) -> None:
    residual = torch.randn(6, 3, 5, dtype=torch.float64) if has_residual else None
    layer = normscope.BatchNormAct1d(3, activation=activation, dtype=torch.float64)
    plain = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    for name in without:
        layer.register_parameter(name, None)
        plain.register_parameter(name, None)

    def of_torch(x: torch.Tensor) -> torch.Tensor:
        z = plain(x)
        return ACTIVATIONS[activation](z if residual is None else z + residual)

    x = torch.randn(6, 3, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for of, module in ((lambda x: layer(x, residual=residual), layer), (of_torch, plain)):
        inputs = [x, *module.parameters()]
        first = torch.autograd.grad(of(x).pow(3).sum(), inputs, create_graph=True)
        total = sum((gradient.square().sum() for gradient in first), torch.zeros(()))
        results.append(torch.autograd.grad(total, inputs))

    for value, want in zip(*results, strict=True):
        torch.testing.assert_close(value, want)


@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_rounded_once(dtype: torch.dtype) -> None:
    shape = (16, 3, 4, 5)
    step = {name: t.to(dtype) for name, t in step_of(shape, 1).items()}
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


def torch_like(batch_norm: Any, step: Tensors) -> list[torch.Tensor]:  # noqa: ANN401
    x, dy, weight, bias = (
        step[name].clone().requires_grad_() for name in ("x", "dy", "weight", "bias")
    )
    y = batch_norm(x, None, None, weight, bias, training=True)
    gradients = torch.autograd.grad(y, [x, weight, bias], dy, create_graph=True)
    weights = (step["of_dx"], step["of_dweight"][0], step["of_dbias"][0])
    return second_gradients(gradients, weights, [dy, x, weight])


def gradient_penalty(frozen_rank: int) -> tuple[torch.Tensor, int]:
    """Compute a gradient penalty; a rank with a frozen input only differentiates its weight."""
    rank = distributed.get_rank()
    step = step_of((4, 3), 2)
    layer = normscope.BatchNorm1d(3, dtype=torch.float64)
    x = step["x"][split_of((2, 2), rank)].requires_grad_(rank != frozen_rank)
    before = normscope.training.communication_counters().calls
    y = layer(x)
    wanted = layer.weight if rank == frozen_rank else x
    [gradient] = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
    gradient.square().sum().backward()
    calls = normscope.training.communication_counters().calls - before
    assert layer.weight.grad is not None
    distributed.all_reduce(layer.weight.grad)
    return layer.weight.grad, calls


def gradient_penalty_of_torch(frozen_rank: int) -> torch.Tensor:
    x = step_of((4, 3), 2)["x"].requires_grad_()
    layer = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    y = layer(x)
    frozen = split_of((2, 2), frozen_rank)
    free = split_of((2, 2), 1 - frozen_rank)
    [dx] = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    [dweight] = torch.autograd.grad(y[frozen].square().sum(), layer.weight, create_graph=True)
    (dx[free].square().sum() + dweight.square().sum()).backward()
    assert layer.weight.grad is not None
    return layer.weight.grad


@pytest.mark.parametrize("frozen_rank", [0, 1])
def test_a_rank_that_needs_some_gradients_takes_part(ranks: RankPool, frozen_rank: int) -> None:
    expected = gradient_penalty_of_torch(frozen_rank)

    for got, calls in ranks.run(2, gradient_penalty, frozen_rank):
        assert calls == 4  # forward, backward, double backward, and y's backward through dy
        allowed = RELATIVE * expected.abs().amax().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=allowed)


def meets_a_forward() -> str:
    rank = distributed.get_rank()
    layer = normscope.BatchNorm1d(3)
    layer.layer_name = "head"
    x = torch.randn(4, 3, requires_grad=True)
    [dx] = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    return error_of(dx.square().sum().backward if rank == 0 else lambda: layer(x))


def test_a_rank_that_does_not_differentiate_twice_is_named(ranks: RankPool) -> None:
    for message in ranks.run(2, meets_a_forward):
        assert "rank 0: double backward of head (3 channels, scope world)" in message
        assert "rank 1: forward of head" in message


@pytest.mark.own_kernels
def test_a_third_derivative_raises() -> None:
    layer = normscope.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    first = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    second = torch.autograd.grad(first[0].sin().sum(), x, create_graph=True)

    with pytest.raises(NotImplementedError, match="at most two differentiations, got a third"):
        second[0].sum().backward()
