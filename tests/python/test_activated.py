# SPDX-License-Identifier: Apache-2.0
"""A layer with an activation has the bits of separate layer, addition and activation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from oracle import results_of
from torch.nn import functional

import normscope

pytestmark = pytest.mark.on_device

Tensors = dict[str, torch.Tensor]
Activate = Callable[[torch.Tensor], torch.Tensor]

# Those with defined bits: silu contains an exponential.
ACTIVATIONS: dict[str, tuple[dict[str, Any], Activate]] = {
    "relu": ({}, functional.relu),
    "relu6": ({"activation": "relu6"}, functional.relu6),
    "hard_swish": ({"activation": "hard_swish"}, functional.hardswish),
    **{
        f"leaky_relu({slope})": (
            {"activation": "leaky_relu", "negative_slope": slope},
            partial(functional.leaky_relu, negative_slope=slope),
        )
        for slope in (0.01, 0.3, 0.0, 1.5, -0.5)
    },
}
# In torch, their derivative at NaN depends on the position in the tensor.
NOT_DEFINED_AT_NAN = ("relu6", "hard_swish")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CHANNELS = 5
SHAPE = (6, CHANNELS, 3, 4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(dtype: torch.dtype) -> Tensors:
    """Return an input, a residual, the gradient of the output, and parameters."""
    return {
        "x": torch.randn(SHAPE).to(dtype),
        "residual": torch.randn(SHAPE).to(dtype),
        "dy": torch.randn(SHAPE).to(dtype),
        "weight": 3 * torch.randn(CHANNELS),
        "bias": torch.randn(CHANNELS),
    }


def off_centre(dtype: torch.dtype) -> Tensors:
    return {**normal(dtype), "x": (3 * torch.randn(SHAPE) + 100).to(dtype)}


def at_kinks(dtype: torch.dtype) -> Tensors:
    """Return data whose sums are at the kinks of the activations.

    Inputs of one half are normalized to one half, because the variance is 0.25 and eps is 0.75. In
    the five channels, y is 0 or 6, -3 or 3, 0, -6 or 0, and -6 or 6. Each channel contains a kink
    of relu, relu6 or hard_swish, even after the addition of multiples of 3.
    """
    halves = torch.tensor([0.5, -0.5]).repeat(SHAPE[0] * 6)
    x = torch.stack([halves[torch.randperm(len(halves))] for _ in range(CHANNELS)])
    return {
        **normal(dtype),
        "x": x.view(CHANNELS, SHAPE[0], 3, 4).transpose(0, 1).contiguous().to(dtype),
        "residual": (3 * torch.randint(-2, 4, SHAPE)).to(dtype),
        "weight": torch.tensor([6.0, 6.0, 0.0, -6.0, 12.0]),
        "bias": torch.tensor([3.0, 0.0, 0.0, -3.0, 0.0]),
    }


def huge(dtype: torch.dtype) -> Tensors:
    scale = torch.finfo(dtype).max / 16
    step = normal(dtype)
    return {**step, **{n: (step[n].double() * scale).to(dtype) for n in ("x", "residual", "dy")}}


def tiny(dtype: torch.dtype) -> Tensors:
    """Return data whose sums and gradients are subnormal in the dtype."""
    step = normal(dtype)
    scale = torch.finfo(dtype).tiny
    small = {n: (step[n].double() * scale).to(dtype) for n in ("residual", "dy")}
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    weight = (step["weight"].double() * scale).to(parameters)
    return {**step, **small, "weight": weight, "bias": torch.zeros(CHANNELS)}


def not_finite(dtype: torch.dtype) -> Tensors:
    step = normal(dtype)
    step["x"][0, 0, 0, 0], step["x"][1, 1, 0, 0] = torch.inf, torch.nan
    step["residual"][0, 2, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    step["dy"][1, 3, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    return step


def empty(dtype: torch.dtype) -> Tensors:
    step = normal(dtype)
    return {**step, **{name: step[name][:0] for name in ("x", "residual", "dy")}}


DATA = [normal, off_centre, at_kinks, tiny, not_finite, empty]
if "NORMSCOPE_TEST_DEVICE" not in os.environ:  # on a device, sums this large have no fixed order
    DATA.append(huge)


def layers_of(
    step: Tensors, keywords: dict[str, Any]
) -> tuple[normscope.BatchNormAct2d, normscope.BatchNorm2d]:
    """Return a layer with the activation and one without, with the same parameters and state."""
    dtype = step["x"].dtype if step["x"].dtype == torch.float64 else torch.float32
    settings: dict[str, Any] = {"eps": 0.75, "scope": "local", "dtype": dtype}
    layers = (
        normscope.BatchNormAct2d(CHANNELS, **settings, **keywords),
        normscope.BatchNorm2d(CHANNELS, **settings),
    )
    for layer in layers:
        state = {name: step[name] for name in ("weight", "bias")}
        layer.load_state_dict(state, strict=False)
    return layers


def in_turn(
    layer: normscope.BatchNorm, activate: Activate, x: torch.Tensor, *residual: torch.Tensor
) -> torch.Tensor:
    y = layer(x)
    for other in residual:
        y = y + other
    return activate(y)


def assert_same(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        value = got[name]
        assert (value.dtype, value.shape) == (want.dtype, want.shape), name
        assert ((value == want) | (value.isnan() & want.isnan())).all(), name


def without_gradients_of_nan(*found: Tensors) -> None:
    """Remove the results that depend on a derivative at NaN."""
    for tensors in found:
        is_nan = tensors["y"].isnan()
        tensors["dbias"] = tensors["dbias"].where(~is_nan.any(dim=(0, 2, 3)), torch.nan)
        if "dresidual" in tensors:
            tensors["dresidual"] = tensors["dresidual"].where(~is_nan, torch.nan)


def with_format(step: Tensors, *, last: bool, residual: bool) -> Tensors:
    if last:
        images = ("x", "residual", "dy")
        last_of = {n: step[n].to(memory_format=torch.channels_last) for n in images}
        step = {**step, **last_of}
    return {name: t for name, t in step.items() if residual or name != "residual"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_step_has_the_bits_of_its_parts(
    name: str, dtype: torch.dtype, *, last: bool, residual: bool
) -> None:
    keywords, activate = ACTIVATIONS[name]
    for data in DATA:
        step = with_format(data(dtype), last=last, residual=residual)
        if name in NOT_DEFINED_AT_NAN and residual:
            step["residual"] = step["residual"].where(~step["residual"].isnan(), 1.0)
        ours, theirs = layers_of(step, keywords)

        inputs = [step[name] for name in ("x", "residual") if name in step]

        got = results_of(ours, *inputs, dy=step["dy"])

        parts = partial(in_turn, theirs, activate)
        expected = results_of(theirs, *inputs, dy=step["dy"], call=parts)
        if name in NOT_DEFINED_AT_NAN:
            without_gradients_of_nan(got, expected)
        assert_same(got, expected)
        if data is not empty:  # torch's activations do not keep the format of empty tensors
            assert got["y"].stride() == expected["y"].stride()
