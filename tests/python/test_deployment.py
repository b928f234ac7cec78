# SPDX-License-Identifier: Apache-2.0
"""Models with normscope's layers can be exported and compiled, and evaluate with torch's ops."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from deployed_networks import assert_close, batch, trained
from rank_pool import RankPool, error_of
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

import normscope

# Warnings of the tools about themselves and their dependencies; none is caused by normscope.
pytestmark = [
    pytest.mark.portable,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Network(nn.Module):
    """One layer of each kind: BatchNorm2d, SyncBatchNorm, and one with a residual."""

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


def network() -> nn.Module:
    torch.manual_seed(0)
    return trained(Network())


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
def test_a_model_exported_to_onnx_evaluates_without_layers(tmp_path: Path, *, dynamo: bool) -> None:
    import onnx
    import onnxruntime

    model, file = network(), tmp_path / "model.onnx"

    torch.onnx.export(model, (batch(1),), file, dynamo=dynamo, input_names=["x"], verbose=False)

    assert {node.domain for node in onnx.load(file).graph.node} == {""}
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    [got] = session.run(None, {"x": batch().numpy()})
    assert_close(torch.from_numpy(got), model(batch()))


def steps(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return y, gradients and buffers after two training steps."""
    for _ in range(2):
        model.zero_grad()
        y = model(x)
        (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach(), *gradients, *(buffer.clone() for buffer in model.buffers())]


# With slices, only a graph of one size can be decomposed.
@pytest.mark.parametrize(
    ("layer", "sizes"),
    [
        ({}, (4, 7)),
        ({"momentum": None}, (4, 7)),
        ({"track_running_stats": False}, (4, 7)),
        ({"scope": "slices:2"}, (4,)),
        ({"scope": "slices:3", "slice_stats": "first"}, (4,)),
        ({"scope": "world"}, (4, 7)),  # no other rank
    ],
)
def test_a_decomposed_training_graph_trains_with_torch_s_ops(
    layer: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), normscope.BatchNorm2d(4, **layer))
    inputs = [torch.randn(size, 3, 6, 6) for size in sizes]
    dynamic = None if len(sizes) == 1 else ({0: torch.export.Dim("n", min=2)},)

    exported = torch.export.export(copy.deepcopy(model), (inputs[0],), dynamic_shapes=dynamic)
    program = exported.run_decompositions()

    assert not any("normscope" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for x in inputs:
        for got, expected in zip(steps(loaded, x), steps(model, x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.own_kernels  # torch's normalize slice by slice: the graph fixes their number
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_training_graph_with_slices_takes_batches_of_other_sizes(
    *, strict: bool
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), normscope.BatchNorm2d(4, scope="slices:3"))
    inputs = [torch.randn(size, 3, 6, 6) for size in (4, 7, 2)]

    shapes = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(
        copy.deepcopy(model), (inputs[0],), dynamic_shapes=shapes, strict=strict
    )

    program = exported.module()
    for x in inputs:
        for got, expected in zip(steps(program, x), steps(model, x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layer", [{"momentum": None}, {"scope": "slices:2"}, {}])
def test_a_recomputation_of_an_exported_program_updates_nothing(layer: dict[str, Any]) -> None:
    # A recomputation ends with the last operation that saves a tensor: the sigmoid.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), normscope.BatchNorm2d(4, **layer), nn.Sigmoid())
    x = torch.randn(4, 3, 6, 6)
    program = torch.export.export(copy.deepcopy(model), (x,)).module()

    checkpoint(program, x, use_reentrant=False).sum().backward()

    model(x)
    for got, expected in zip(program.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def of_exported_on_rank() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), normscope.BatchNorm2d(4, scope="world"))
    x = torch.randn(4, 3, 6, 6) + distributed.get_rank()
    program = torch.export.export(copy.deepcopy(model), (x,))
    got = steps(program.module(), x)
    y = program.run_decompositions().module()(x)
    return got, steps(model, x), y, error_of(y.sum().backward, NotImplementedError)


def test_an_exported_training_graph_with_exchanges_trains_before_its_decomposition_only(
    ranks: RankPool,
) -> None:
    for got, expected, y, refusal in ranks.run(2, of_exported_on_rank):
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
        assert_close(y, expected[0])
        assert "train the program without run_decompositions()" in refusal


def test_a_training_graph_can_be_exported_to_onnx(tmp_path: Path) -> None:
    import onnxruntime

    model = nn.Sequential(normscope.BatchNorm2d(3))
    x = torch.randn(4, 3, 6, 6) + 5
    file = str(tmp_path / "model.onnx")

    program = torch.export.export(copy.deepcopy(model), (x,))
    torch.onnx.export(program, (x,), file, input_names=["x"], verbose=False)

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert_close(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model(x))
