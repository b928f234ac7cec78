# SPDX-License-Identifier: Apache-2.0
"""timm: a model from each of its modules converts, and layers with activations train as before."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import client
import pytest
import timm
import torch
from client import Client, NetworkTests, outputs_for, samples, seeded
from timm import layers as timm_layers
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook

import normscope


def test_a_model_from_each_module_converts_and_reverts() -> None:
    converted = 0
    for module in timm.list_modules():
        name = timm.list_models(module=module)[0]
        with torch.device("meta"):
            model = timm.create_model(name)
        before = {n: (m, type(m), set(m.__dict__)) for n, m in model.named_modules()}
        if not any(isinstance(m, _BatchNorm) for m in model.modules()):
            continue

        normscope.convert(model, "slices:2")

        layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
        assert all(isinstance(layer, normscope.BatchNorm) for layer in layers), name
        normscope.revert(model)
        after = {n: (m, type(m), set(m.__dict__)) for n, m in model.named_modules()}
        assert after == before, name
        converted += 1
    assert converted >= 58


classified = outputs_for(3, 64, 64)


def client_of(name: str) -> Client:
    return Client(lambda: timm.create_model(name), classified)


CLIENTS = {
    "resnet": client_of("resnet10t"),
    "resnetv2": client_of("resnetv2_18"),  # relu
    "efficientnet": client_of("test_efficientnet"),  # silu
    "mobilenetv3": client_of("mobilenetv3_small_050"),  # hard_swish
    "cspnet": client_of("cspresnet50"),  # leaky_relu
    "byobnet": client_of("test_byobnet"),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "relu": {"act_layer": nn.ReLU},
    "relu6": {"act_layer": "relu6"},
    "leaky_relu": {"act_layer": "leaky_relu", "act_kwargs": {"negative_slope": 0.3}},
    "silu": {"act_layer": "silu"},
    "hard_swish": {"act_layer": "hard_swish"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "none": {"apply_act": False},
    "gelu": {"act_layer": "gelu", "inplace": False},
    "drop": {"drop_layer": nn.Tanh, "inplace": False},
    "own class": {"act_layer": timm_layers.HardSwish, "inplace": False},
}


def layer_of(keywords: dict[str, Any]) -> nn.Module:
    return seeded(lambda: timm_layers.BatchNormAct2d(3, **keywords))


def outputs(model: nn.Module, part: slice) -> torch.Tensor:
    y: torch.Tensor = model(samples(3, 5, 5)[part].clone().requires_grad_() * 2)
    return y


def has_one_op(layer: nn.Module) -> bool:
    """Return whether the whole layer is a single node for autograd."""
    node = layer(samples(3, 5, 5).requires_grad_()).grad_fn
    assert node is not None
    return "normscope" in node.name()


@pytest.mark.parametrize("name", [*ACTIVATIONS, *OTHERS])
def test_layers_compute_the_same_as_timm_s(name: str) -> None:
    keywords = (ACTIVATIONS | OTHERS)[name]

    client.assert_trains_as_torch(Client(lambda: nn.Sequential(layer_of(keywords)), outputs))

    one_op = name in ACTIVATIONS or name == "none"
    assert has_one_op(normscope.convert(layer_of(keywords), "local")) == one_op


@pytest.mark.parametrize("name", ["drop", "act"])
def test_hooks_of_drop_and_act_are_called(name: str) -> None:
    layer: Any = normscope.convert(layer_of({}), "local")
    called: list[str] = []
    layer.get_submodule(name).register_forward_hook(lambda *_: called.append(name))

    layer(samples(3, 5, 5))

    assert called == [name]


def test_hooks_of_all_modules_are_called() -> None:
    layer: Any = normscope.convert(layer_of({}), "local")
    called: list[nn.Module] = []

    hook = register_module_forward_hook(lambda module, *_: called.append(module))
    try:
        layer(samples(3, 5, 5))
    finally:
        hook.remove()

    assert called == [layer.drop, layer.act, layer]


def test_layers_compile_into_one_graph() -> None:
    model: Any = nn.Sequential(*[layer_of(ACTIVATIONS["silu"]), layer_of(OTHERS["gelu"])])
    converted = normscope.convert(copy.deepcopy(model), "local")
    x = samples(3, 5, 5)

    compiled: Any = torch.compile(converted, backend="eager", fullgraph=True)

    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=client.TOLERANCE)


def test_models_without_timm_do_not_import_it() -> None:
    program = """
import sys
import normscope, torch

class Own(torch.nn.BatchNorm2d):
    pass

normscope.convert(torch.nn.BatchNorm2d(3))
try:
    normscope.convert(Own(3))
except TypeError:
    sys.exit("timm" in sys.modules)
sys.exit(2)
"""

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_layers_can_be_scripted_once_they_are_timm_s_again() -> None:
    model: Any = nn.Sequential(normscope.convert(layer_of({"act_layer": "silu"}), "local")).eval()
    x = samples(3, 5, 5)
    expected = model(x)

    with pytest.raises(TypeError, match=r"got a BatchNormAct2d of normscope, .*to_torch\(model\)"):
        torch.jit.script(model)

    assert torch.equal(torch.jit.script(normscope.to_torch(model))(x), expected)


def test_timm_s_layers_can_be_deployed() -> None:
    model = normscope.convert(CLIENTS["efficientnet"].network(), "slices:2").eval()
    classes = [type(layer) for layer in CLIENTS["efficientnet"].network().modules()]
    expected = model(samples(3, 64, 64))

    assert [type(layer) for layer in normscope.to_torch(model).modules()] == classes

    assert torch.equal(model(samples(3, 64, 64)), expected)


def test_timm_s_synchronized_layers_convert_and_revert() -> None:
    model: Any = timm_layers.convert_sync_batchnorm(CLIENTS["resnetv2"].network())
    classes = [type(layer) for layer in model.modules()]
    assert timm_layers.SyncBatchNormAct in classes

    normscope.convert(model, "local")

    kinds = {type(layer) for layer in model.modules() if isinstance(layer, normscope.BatchNorm)}
    assert all(issubclass(kind, nn.SyncBatchNorm) for kind in kinds)
    assert any(issubclass(kind, timm_layers.SyncBatchNormAct) for kind in kinds)
    expected = client.step_of(CLIENTS["resnetv2"].network(), classified)
    client.assert_equal_steps(client.step_of(model, classified), expected)
    normscope.revert(model)
    assert [type(layer) for layer in model.modules()] == classes


def test_timm_s_conversions_keep_the_activation_of_a_converted_model() -> None:
    x = samples(3, 64, 64)
    plain: Any = CLIENTS["efficientnet"].network()
    expected = plain.eval()(x)
    for change in (timm_layers.freeze_batch_norm_2d, timm_layers.convert_sync_batchnorm):
        model = normscope.convert(CLIENTS["efficientnet"].network(), "local").eval()

        changed: nn.Module = change(model)

        assert not any(isinstance(layer, normscope.BatchNorm) for layer in changed.modules())
        torch.testing.assert_close(changed(x), expected, rtol=0, atol=client.TOLERANCE)


def test_split_layers_train_as_timm_s() -> None:
    def split() -> nn.Module:
        model: nn.Module = timm_layers.convert_splitbn_model(CLIENTS["resnetv2"].network(), 2)
        return model

    client.assert_trains_as_torch(Client(split, classified))


def test_frozen_layers_are_not_converted() -> None:
    model = timm_layers.freeze_batch_norm_2d(CLIENTS["resnetv2"].network())

    with pytest.warns(UserWarning, match="layers to convert, got none in ResNetV2"):
        normscope.convert(model)
