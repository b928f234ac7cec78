# SPDX-License-Identifier: Apache-2.0
"""Models with normscope's layers can be exported and compiled, and evaluate with torch's ops."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from deployed_networks import assert_close, batch, network
from torch import nn

import normscope

# Warnings of the tools about themselves and their dependencies; none is caused by normscope.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize(
    "layer",
    [
        normscope.BatchNorm2d(3),
        normscope.BatchNormAct2d(3),
        normscope.SyncBatchNorm(3),
        normscope.convert(nn.BatchNorm2d(3)),
        normscope.convert(nn.LazyBatchNorm2d()),
    ],
    ids=["BatchNorm2d", "BatchNormAct2d", "SyncBatchNorm", "converted", "lazy"],
)
def test_scripting_a_layer_raises_and_names_to_torch(layer: nn.Module) -> None:
    for model in (layer, nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(layer))):
        with pytest.raises(TypeError, match=r"^torch.jit.script: .* normscope.to_torch\(model\)"):
            torch.jit.script(model.eval())


def test_a_model_with_torch_s_layers_can_be_scripted() -> None:
    model = network()
    expected = model(batch())
    file = io.BytesIO()

    torch.jit.save(torch.jit.script(normscope.to_torch(model, any_dims=nn.BatchNorm2d)), file)
    file.seek(0)

    assert torch.equal(torch.jit.load(file)(batch()), expected)


def test_an_exported_model_evaluates_with_torch_s_ops() -> None:
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
def test_a_model_exported_to_onnx_evaluates_without_layers(tmp_path: Path, dynamo: bool) -> None:  # noqa: FBT001
    import onnx
    import onnxruntime

    model, file = network(), tmp_path / "model.onnx"

    torch.onnx.export(model, (batch(1),), file, dynamo=dynamo, input_names=["x"], verbose=False)

    assert {node.domain for node in onnx.load(file).graph.node} == {""}
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [got] = session.run(None, {"x": batch().numpy()})
    assert_close(torch.from_numpy(got), model(batch()))


def test_a_training_graph_trains_after_its_decomposition() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), normscope.BatchNorm2d(4, scope="slices:2"))
    x = torch.randn(4, 3, 6, 6)
    program = torch.export.export(copy.deepcopy(model), (x,)).run_decompositions()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()

    assert_close(loaded(x), model(x))

    buffers = dict(loaded.named_buffers())
    for name, expected in model.named_buffers():
        torch.testing.assert_close(buffers[name], expected, rtol=0, atol=1e-5)  # float32 numbers
    assert any("normscope" in str(node.target) for node in program.graph.nodes)


def test_a_training_graph_without_normscope_s_ops_needs_to_torch() -> None:
    model = normscope.to_torch(nn.Sequential(normscope.BatchNorm2d(3)))

    program = torch.export.export(model, (torch.randn(4, 3, 6, 6),)).run_decompositions()

    assert model.training
    assert not any("normscope" in str(node.target) for node in program.graph.nodes)
