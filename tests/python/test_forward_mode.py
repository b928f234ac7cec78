# SPDX-License-Identifier: Apache-2.0
"""Forward-mode derivatives: an error in training, torch's own in evaluation; never zeros."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import normscope

# A warning of torch, caused by its imports for forward mode.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def by_dual_numbers(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent: torch.Tensor = forward_ad.unpack_dual(y).tangent.clone()
        return tangent


def of_the_weight(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    def call(weight: torch.Tensor) -> Any:  # noqa: ANN401
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    weight = torch.ones(3, dtype=x.dtype)
    tangent: torch.Tensor = torch.func.jvp(call, (weight,), (weight,))[1]
    return tangent


def of_the_residual(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    tangent: torch.Tensor = torch.func.jvp(lambda r: layer(x, r), (x,), (x,))[1]
    return tangent


FORWARD_MODE: list[Callable[[Any, torch.Tensor], torch.Tensor]] = [
    lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),))[1],
    lambda layer, x: torch.func.jacfwd(layer)(x),
    by_dual_numbers,
    of_the_weight,
]


def layers() -> list[normscope.BatchNorm2d]:
    return [
        normscope.BatchNorm2d(3, scope="local", dtype=torch.float64),
        normscope.BatchNormAct2d(3, scope="slices:2", dtype=torch.float64),
    ]


@pytest.mark.parametrize("derivative", FORWARD_MODE)
def test_forward_mode_in_training_raises_and_updates_nothing(
    derivative: Callable[..., Any],
) -> None:
    for layer in layers():
        before = copy.deepcopy(layer.state_dict())

        with pytest.raises(NotImplementedError, match=r"forward-mode .* use reverse mode"):
            derivative(layer, torch.randn(4, 3, 2, 2, dtype=torch.float64))

        assert layer.elements_seen == 0
        assert all(map(torch.equal, layer.state_dict().values(), before.values()))


def test_forward_mode_over_a_residual_raises() -> None:
    layer = normscope.BatchNormAct2d(3, scope="local")

    with pytest.raises(NotImplementedError, match=r"forward-mode .* use reverse mode"):
        of_the_residual(layer, torch.randn(4, 3, 2, 2))

    assert layer.elements_seen == 0
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("derivative", FORWARD_MODE)
def test_forward_mode_in_evaluation_is_that_of_torch(derivative: Callable[..., Any]) -> None:
    theirs = torch.nn.BatchNorm2d(3, dtype=torch.float64).eval()
    ours = layers()[0].eval()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)

    assert torch.equal(derivative(ours, x), derivative(theirs, x))
