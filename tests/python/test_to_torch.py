# SPDX-License-Identifier: Apache-2.0
"""to_torch converts a model to torch's layers, however normscope's layers got into it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import normscope

SETTINGS: dict[str, Any] = {"eps": 1e-3, "momentum": None, "affine": False}
# Layers, and torch's that they become.
LAYERS: list[tuple[nn.Module, nn.Module]] = [
    (normscope.BatchNorm1d(3, scope="slices:2", **SETTINGS), nn.BatchNorm1d(3)),
    (normscope.BatchNorm2d(3, scope="slices:2", **SETTINGS), nn.BatchNorm2d(3)),
    (normscope.BatchNorm3d(3, scope="slices:2", **SETTINGS), nn.BatchNorm3d(3)),
    (normscope.convert(nn.BatchNorm2d(3, **SETTINGS)), nn.BatchNorm2d(3)),
    (normscope.convert(nn.LazyBatchNorm2d(**SETTINGS)), nn.LazyBatchNorm2d()),
]
ACTIVATIONS = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "hard_swish": nn.Hardswish,
}


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module) -> nn.Module:
    """Give the model non-initial running statistics; return it in evaluation."""
    model(batch() * 2 + 1)
    return model.eval()


@pytest.mark.parametrize(("layer", "plain"), LAYERS)
def test_a_layer_gets_the_class_and_attributes_of_torch_s_layer(
    layer: Any, plain: nn.Module
) -> None:
    mean = layer.running_mean

    assert normscope.to_torch(layer) is layer

    assert type(layer) is type(plain)
    assert vars(layer).keys() == vars(plain).keys()
    assert {name: getattr(layer, name) for name in SETTINGS} == SETTINGS
    assert layer.running_mean is mean


def test_hooks_mode_and_state_are_kept() -> None:
    model = nn.Sequential(normscope.BatchNorm2d(3, scope="local"))
    called = []
    model[0].register_forward_hook(lambda *_: called.append("forward"))
    trained(model)
    expected, state = model(batch()), copy.deepcopy(model.state_dict())

    normscope.to_torch(model)

    assert torch.equal(model(batch()), expected)
    assert called == ["forward"] * 3
    assert not model[0].training
    assert model.state_dict().keys() == state.keys()
    assert all(map(torch.equal, model.state_dict().values(), state.values()))


@pytest.mark.parametrize(
    "layer",
    [
        normscope.SyncBatchNorm(3),
        normscope.BatchNorm(3),
        normscope.convert(nn.SyncBatchNorm(3)),
        normscope.BatchNormAct(3),
    ],
    ids=["SyncBatchNorm", "BatchNorm", "converted", "BatchNormAct"],
)
def test_a_layer_for_any_dimensions_needs_any_dims(layer: nn.Module) -> None:
    model = nn.Sequential(normscope.BatchNorm2d(3), nn.Sequential(copy.deepcopy(layer)))
    expected = trained(model)(batch())

    for wrong in (None, nn.SyncBatchNorm, normscope.BatchNorm2d):
        with pytest.raises(ValueError, match=r"any_dims: expected torch.nn.BatchNorm1d.* for 1\.0"):
            normscope.to_torch(model, any_dims=wrong)
        assert type(model[0]) is normscope.BatchNorm2d

    normscope.to_torch(model, any_dims=nn.BatchNorm2d)
    assert nn.BatchNorm2d in {type(module) for module in model[1].modules()}
    assert torch.equal(model(batch()), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_with_an_activation_becomes_two(activation: str) -> None:
    model = nn.Module()
    model.norm = normscope.BatchNormAct2d(3, activation=activation, negative_slope=0.2)  # type: ignore[arg-type]
    model.alias = model.norm
    parameters = list(model.parameters())
    expected = trained(model.norm)(batch())

    normscope.to_torch(model)

    norm, act = model.get_submodule("norm.0"), model.get_submodule("norm.1")
    assert (type(norm), type(act)) == (nn.BatchNorm2d, ACTIVATIONS[activation])
    assert norm.__dict__.keys() == nn.BatchNorm2d(3).__dict__.keys()
    assert model.alias is model.norm
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert {module.training for module in model.norm.modules()} == {False}
    assert torch.equal(model.norm(batch()), expected)


def test_a_single_layer_with_an_activation_is_replaced_by_the_result() -> None:
    layer = normscope.BatchNormAct2d(3)
    expected = trained(layer)(batch(), batch().sin())

    replacement = normscope.to_torch(layer)

    assert torch.equal(replacement(batch(), batch().sin()), expected)
    assert type(layer) is normscope.BatchNormAct2d
