# SPDX-License-Identifier: Apache-2.0
"""Layers with parametrized weights: conversion, training, removal and revert."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import normscope

pytestmark = pytest.mark.on_device

# For a few hundred entries of order one in float64: eps 2e-16 times some hundred roundings.
ROUNDING = 1e-12


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def doubled(layer: nn.Module, name: str = "weight") -> nn.Module:
    return parametrize.register_parametrization(layer, name, Doubled())


def doubled_twice(layer: nn.Module, name: str = "weight") -> nn.Module:
    return doubled(doubled(layer, name), "bias")


Parametrize = Callable[[nn.Module], nn.Module]
PARAMETRIZE: list[Parametrize] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    doubled,
    doubled_twice,
]
# torch's older functions use hooks, and are deprecated.
OLDER: list[Parametrize] = [nn.utils.weight_norm, nn.utils.spectral_norm]
warned = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


def model(change: Parametrize) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    nn.init.normal_(net[1].get_parameter("weight"))
    change(net[1])
    return net


def steps(net: nn.Module) -> list[torch.Tensor]:
    """Run two training steps and an evaluation."""
    generator = torch.Generator().manual_seed(1)
    outputs = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        y = net(torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.float64))
        y.sin().sum().backward()
        optimizer.step()
        outputs.append(y.detach())
    outputs.append(net.eval()(torch.ones(4, 3, 6, 6, dtype=torch.float64)).detach())
    net.train()
    return [*outputs, *net.state_dict().values()]


def assert_near(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)


@warned
@pytest.mark.parametrize("change", [*PARAMETRIZE, *OLDER])
def test_a_converted_layer_trains_like_torch_s_and_can_be_reverted(change: Parametrize) -> None:
    theirs, ours = model(change), model(change)
    parameters = list(ours.parameters())

    normscope.convert(ours, "local")

    assert isinstance(ours[1], normscope.BatchNorm2d)
    assert all(a is b for a, b in zip(ours.parameters(), parameters, strict=True))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_near(steps(ours), steps(theirs))
    normscope.revert(ours)
    assert not isinstance(ours[1], normscope.BatchNorm)
    assert type(ours[1]).__name__ == type(theirs[1]).__name__
    assert parametrize.type_before_parametrizations(ours[1]) is nn.BatchNorm2d
    assert vars(ours[1]).keys() == vars(theirs[1]).keys()
    theirs.load_state_dict(ours.state_dict())
    assert all(map(torch.equal, steps(ours), steps(theirs)))


@pytest.mark.parametrize("change", PARAMETRIZE)
def test_removing_the_parametrizations_leaves_a_plain_layer(change: Parametrize) -> None:
    net = normscope.convert(model(change), "local")
    layer: Any = net[1]
    steps(net)
    weight = layer.weight.detach().clone()

    for name in [*layer.parametrizations]:
        parametrize.remove_parametrizations(layer, name)

    assert type(layer) is normscope.BatchNorm2d
    assert type(layer.weight) is nn.Parameter
    assert torch.equal(layer.weight, weight)
    assert type(normscope.revert(net)[1]) is nn.BatchNorm2d


def test_a_layer_parametrized_after_convert_can_be_reverted() -> None:
    net = doubled(normscope.convert(nn.BatchNorm2d(4), "local"))
    theirs = doubled(nn.BatchNorm2d(4))
    x = torch.randn(4, 4, 3, 3)

    assert normscope.convert(net, "slices:2").scope == normscope.Scope("slices:2")
    assert isinstance(net, normscope.BatchNorm2d)
    normscope.revert(net)

    assert torch.equal(net(x), theirs(x))
    parametrize.remove_parametrizations(net, "weight")
    assert type(net) is nn.BatchNorm2d


@pytest.mark.parametrize("converted", [True, False])
def test_to_torch_keeps_parametrizations(*, converted: bool) -> None:
    layer = nn.BatchNorm2d(4) if converted else normscope.BatchNorm2d(4)
    net = nn.Sequential(doubled(layer))
    normscope.convert(net, "slices:2")
    net(torch.randn(4, 4, 3, 3))
    net.eval()
    x = torch.randn(4, 4, 3, 3)
    y = net(x)

    normscope.to_torch(net)

    assert parametrize.type_before_parametrizations(net[0]) is nn.BatchNorm2d
    assert torch.equal(net(x), y)


def test_a_copy_keeps_its_class() -> None:
    net = model(doubled)
    twin = copy.deepcopy(net)

    normscope.convert(net, "local")

    assert not isinstance(twin[1], normscope.BatchNorm)
    assert isinstance(copy.deepcopy(net)[1], normscope.BatchNorm2d)
    assert_near(steps(copy.deepcopy(net)), steps(twin))
