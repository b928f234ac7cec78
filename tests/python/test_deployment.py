# SPDX-License-Identifier: Apache-2.0
"""What exports, compiles, fuses and quantizes models does so with normscope's layers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

import normscope

# What the tools say of themselves and of what they use; none of it is of normscope's.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quant:UserWarning"),
]

# Sums of at most 72 products, of order ten, in another order: a few dozen roundings of float32.
ABSOLUTE = 72 * 10 * 6e-8


class Network(nn.Module):
    """Each way to have a layer of normscope: as itself, for torch's other class, with a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.norm1 = normscope.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = normscope.SyncBatchNorm(8)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm3 = normscope.BatchNormAct2d(8, activation="relu6", scope="local")
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        z = self.relu(self.norm2(self.conv2(y)))
        out: torch.Tensor = self.norm3(self.conv3(z), residual=y)
        return out


class Plain(nn.Module):
    """Convolutions and layers one after the other, which can be fused and quantized."""

    def __init__(self, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = norm(8)
        self.act = act()
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.act(self.norm(self.conv(x))))
        return y


# By each way that a layer comes into a model. The last two have what torch's has in two places.
PLAIN: dict[str, tuple[Callable[[int], nn.Module], Callable[[], nn.Module]]] = {
    "class": (normscope.BatchNorm2d, nn.ReLU),
    "synchronized": (normscope.SyncBatchNorm, nn.ReLU),
    "converted": (lambda c: normscope.convert(nn.BatchNorm2d(c)), nn.ReLU),
    "activated": (normscope.BatchNormAct2d, nn.Identity),
}


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module) -> nn.Module:
    """With running statistics and parameters that are not those of a new layer; in evaluation."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5, generator)
            nn.init.normal_(module.bias, generator=generator)
    for seed in range(3):
        model(batch(seed))
    return model.eval()


def network() -> nn.Module:
    torch.manual_seed(0)
    return trained(Network())


def plain(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return trained(Plain(*PLAIN[kind]))


def of_torch() -> nn.Module:
    """The same network, of torch's layer."""
    model = Plain(nn.BatchNorm2d, nn.ReLU)
    model.load_state_dict(plain("class").state_dict())
    return model.eval()


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)


# ---- Without a change of the model ---------------------------------------------------------------


def test_a_scripted_model_evaluates() -> None:
    model = network()
    file = io.BytesIO()

    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)

    assert torch.equal(torch.jit.load(file)(batch()), model(batch()))
    assert "normscope::" not in str(torch.jit.script(model).inlined_graph)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track_running_stats", [True, False])
def test_a_scripted_layer_may_lack_parameters_and_statistics(
    affine: bool,  # noqa: FBT001
    track_running_stats: bool,  # noqa: FBT001
) -> None:
    layer = normscope.BatchNorm2d(3, affine=affine, track_running_stats=track_running_stats)
    layer(batch(1))

    assert torch.equal(torch.jit.script(layer.eval())(batch()), layer(batch()))


def test_a_scripted_model_does_not_train() -> None:
    scripted = torch.jit.script(normscope.BatchNorm2d(3).eval())

    with pytest.raises(torch.jit.Error, match="expected a scripted layer of normscope in evalu"):
        scripted.train()(batch())


@pytest.mark.parametrize("adds_into", ["new", "output", "residual"])
def test_a_scripted_sum_writes_where_the_layer_does(adds_into: str) -> None:
    layer = normscope.BatchNormAct2d(3, activation="leaky_relu").eval()
    vars(layer)["_adds_into"] = adds_into  # as fuse does
    mine, theirs = batch(1), batch(1)

    y = torch.jit.script(layer)(batch(), mine)

    assert torch.equal(y, layer(batch(), theirs))
    assert torch.equal(mine, theirs)


def test_a_traced_model_evaluates() -> None:
    model = network()
    file = io.BytesIO()

    torch.jit.save(torch.jit.trace(model, (batch(1),)), file)
    file.seek(0)

    assert torch.equal(torch.jit.load(file)(batch()), model(batch()))


def test_an_exported_model_evaluates_by_ops_of_torch() -> None:
    model = network()
    file = io.BytesIO()

    torch.export.save(torch.export.export(model, (batch(1),)), file)
    file.seek(0)
    program = torch.export.load(file)

    assert torch.equal(program.module()(batch()), model(batch()))
    assert not any("normscope" in str(node.target) for node in program.graph.nodes)


@pytest.mark.slow
def test_a_model_compiled_ahead_of_time_evaluates(tmp_path: Path) -> None:
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    model = network()
    program = torch.export.export(model, (batch(1),))

    path = aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))

    assert_close(aoti_load_package(path)(batch()), model(batch()))


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_has_no_layer_left_and_evaluates(tmp_path: Path, dynamo: bool) -> None:  # noqa: FBT001
    import onnx
    import onnxruntime

    model, file = network(), tmp_path / "model.onnx"

    torch.onnx.export(model, (batch(1),), file, dynamo=dynamo, input_names=["x"], verbose=False)

    assert {node.domain for node in onnx.load(file).graph.node} == {""}
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [got] = session.run(None, {"x": batch().numpy()})
    assert_close(torch.from_numpy(got), model(batch()))


# ---- By to_torch ---------------------------------------------------------------------------------


def fuse_eager(model: nn.Module) -> nn.Module:
    from torch.ao.quantization import fuse_modules

    names = ["norm.0", "norm.1"] if isinstance(model.norm, nn.Sequential) else ["norm", "act"]
    fused: nn.Module = fuse_modules(model, [["conv", *names]])
    return fused


def fuse_fx(model: nn.Module) -> nn.Module:
    from torch.ao.quantization.quantize_fx import fuse_fx

    return fuse_fx(model)


def fuse_experimental(model: nn.Module) -> nn.Module:
    from torch.fx.experimental.optimization import fuse

    return fuse(model)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("fuse", [fuse_eager, fuse_fx, fuse_experimental])
def test_layers_are_folded_into_convolutions(
    fuse: Callable[[nn.Module], nn.Module], kind: str
) -> None:
    model = plain(kind)
    expected = model(batch())

    fused = fuse(normscope.to_torch(model, any_dims=nn.BatchNorm2d))

    assert not layers(fused)
    assert_close(fused(batch()), expected)


@pytest.mark.parametrize("fuse", [fuse_fx, fuse_experimental])
def test_layers_with_a_sum_are_folded(fuse: Callable[[nn.Module], nn.Module]) -> None:
    model = network()
    expected = model(batch())

    fused = fuse(normscope.to_torch(normscope.fuse(model), any_dims=nn.BatchNorm2d))

    assert not layers(fused)
    assert_close(fused(batch()), expected)


def test_a_layer_is_folded_by_hand() -> None:
    conv, norm = nn.Conv2d(3, 8, 3), normscope.BatchNorm2d(8)
    expected = trained(nn.Sequential(conv, norm))(batch())

    folded = nn.utils.fuse_conv_bn_eval(conv, norm)

    assert_close(folded(batch()), expected)


def quantize_eager(model: nn.Module) -> nn.Module:
    from torch.ao import quantization

    wrapped = nn.Sequential(quantization.QuantStub(), model, quantization.DeQuantStub()).eval()
    wrapped.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(wrapped)
    prepared(batch())
    quantized: nn.Module = quantization.convert(prepared)
    return quantized


def test_a_model_is_quantized_eagerly_as_that_of_torchs_layers() -> None:
    quantized = quantize_eager(fuse_eager(normscope.to_torch(plain("class"))))

    assert not layers(quantized)
    assert torch.equal(quantized(batch()), quantize_eager(fuse_eager(of_torch()))(batch()))


def quantize(model: nn.Module) -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batch(),))
    prepared(batch())
    quantized: nn.Module = convert_fx(prepared)
    return quantized


@pytest.mark.parametrize("kind", PLAIN)
def test_a_quantized_model_is_that_of_torchs_layers(kind: str) -> None:
    quantized = quantize(normscope.to_torch(plain(kind), any_dims=nn.BatchNorm2d))

    assert not layers(quantized)
    assert torch.equal(quantized(batch()), quantize(of_torch())(batch()))


@pytest.mark.parametrize("kind", PLAIN)
def test_quantization_warns_of_layers_that_it_passes_over(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"norm: torch.ao.*normscope.to_torch\(model\)"):
        quantize(plain(kind))


def prepare_qat(model: nn.Module) -> fx.GraphModule:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    model = normscope.to_torch(model).train()
    return prepare_qat_fx(model, get_default_qat_qconfig_mapping(), (batch(),))


def train_quantized() -> tuple[list[torch.Tensor], int, bool]:
    """Training with a scope, on two ranks: the running statistics, and what is left of layers."""
    from torch.ao.quantization.quantize_fx import convert_fx

    prepared = normscope.convert(prepare_qat(plain("class")), "world")
    prepared(batch(distributed.get_rank())).square().sum().backward()
    [layer] = [module for module in prepared.modules() if isinstance(module, normscope.BatchNorm2d)]
    statistics = [layer.running_mean.clone(), layer.running_var.clone()]  # type: ignore[union-attr]
    expected = prepared.eval()(batch())
    quantized = convert_fx(normscope.revert(prepared))
    # Of outputs in steps of a 255th of their range, the weights too: a few steps.
    near = (quantized(batch()) - expected).abs().max() < 0.05 * expected.abs().max()
    return statistics, len(layers(quantized)), bool(near)


def test_ranks_share_statistics_in_training_for_quantization(ranks: RankPool) -> None:
    (mine, left, near), (theirs, *_) = ranks.run(2, train_quantized)

    alone = prepare_qat(plain("class"))
    alone(batch(0))
    assert all(map(torch.equal, mine, theirs))
    [layer] = [module for module in alone.modules() if isinstance(module, nn.BatchNorm2d)]
    assert layer.running_mean is not None
    assert not torch.allclose(mine[0], layer.running_mean)
    assert (left, near) == (0, True)


def quantize_pt2e(model: nn.Module, *, is_qat: bool) -> Any:  # noqa: ANN401 - a GraphModule
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import (
        convert_pt2e,
        prepare_pt2e,
        prepare_qat_pt2e,
    )
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config(is_qat=is_qat))
    program = torch.export.export(model.train(is_qat), (batch(),)).module()
    prepared = (prepare_qat_pt2e if is_qat else prepare_pt2e)(program, quantizer)
    prepared(batch())
    if is_qat:
        move_exported_model_to_eval(prepared)
    return convert_pt2e(prepared)


def test_an_exported_model_is_quantized_as_that_of_torchs_layers() -> None:
    got, expected = (quantize_pt2e(m, is_qat=False) for m in (plain("class"), of_torch()))

    assert torch.equal(got(batch()), expected(batch()))


@pytest.mark.slow
def test_an_exported_model_trains_for_quantization_with_torchs_layers() -> None:
    model = normscope.to_torch(plain("activated"))

    got, expected = (quantize_pt2e(m, is_qat=True) for m in (model, of_torch()))

    assert not any("norm" in str(node.target) for node in got.graph.nodes)
    assert torch.equal(got(batch()), expected(batch()))


def test_a_copy_can_be_deployed_while_the_model_trains_on() -> None:
    model = network()

    deployed = normscope.to_torch(copy.deepcopy(model), any_dims=nn.BatchNorm2d)

    assert torch.equal(deployed(batch()), model(batch()))
    assert len([m for m in model.modules() if isinstance(m, normscope.BatchNorm)]) == 3
