# SPDX-License-Identifier: Apache-2.0
"""A fused model computes the same as the original, with the same parameters and buffers."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn
from torch.nn import functional

import models
import normscope


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fused_layers(model: nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, normscope.BatchNormAct)]


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return all results of a training step and a subsequent evaluation."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    y = model.train()(x)
    y.float().square().sum().backward()
    gradients = {f"d {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {"y": y, "dx": x.grad, **gradients, **model.state_dict()}
    found["evaluation"] = model.eval()(x)
    return {name: t.detach().clone() for name, t in found.items() if t is not None}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name
    assert got["y"].stride() == expected["y"].stride()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    # All layers are followed by an activation except those of the four shortcuts.
    "resnet_50": (models.resnet_50, (2, 3, 32, 32), 53, 49),
    "deeplab": (models.deeplab, (2, 3, 32, 32), 59, 55),
    # All layers are followed by an activation except the last one in each of the 17 blocks.
    "mobilenet_v2": (models.mobilenet_v2, (2, 3, 32, 32), 53, 36),
    "unet_3d": (models.UNet3d, (2, 1, 4, 8, 4), 10, 10),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_fused_network_has_the_bits_of_the_network(network: str, channels_last: bool) -> None:  # noqa: FBT001
    make, shape, layers, expected = NETWORKS[network]
    torch.manual_seed(0)
    model = normscope.convert(make(), "slices:2" if network == "unet_3d" else "local")
    x = torch.randn(shape)
    if channels_last:
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        model, x = model.to(memory_format=last), x.to(memory_format=last)  # type: ignore[call-overload]
    alone = copy.deepcopy(model)

    fused = normscope.fuse(model)

    assert len(fused_layers(fused)) == expected
    assert sum(isinstance(m, normscope.BatchNorm) for m in fused.modules()) == layers
    assert fused_layers(model) == []
    assert_same(step(fused, x), step(alone, x))
    assert torch.equal(model.eval()(x), fused(x))


class Block(nn.Module):
    """Two layers, and the forward of a test case."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.relu, self.act = nn.ReLU(inplace=True), nn.LeakyReLU(0.2)
        self.silu = nn.SiLU()
        self.leaky, self.relu6 = nn.LeakyReLU(0.2), nn.ReLU6(inplace=True)
        self.hard_swish = nn.Hardswish()
        self.weight = nn.Parameter(torch.ones(3, 1, 1))
        self.run = forward
        normscope.convert(self, "slices:2")

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401 - depends on the test case
        assert self.run is not None
        return self.run(self, x)


def iadd(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    left += right
    return left


def call_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def with_alias(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = normalized = block.a(x)
    y += x
    return block.act(y) * normalized  # type: ignore[no-any-return]


def written_meanwhile(block: Block, x: torch.Tensor) -> torch.Tensor:
    residual = x.sin()
    y = block.a(x)
    residual *= 2
    return torch.relu(y + residual)


FUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], list[str]]] = {
    "a module": (lambda m, x: m.act(m.a(x)), ["a"]),
    "in place": (lambda m, x: m.relu(m.a(x)), ["a"]),
    "functions": (lambda m, x: functional.hardswish(m.b(torch.relu(m.a(x)))), ["a", "b"]),
    "methods": (lambda m, x: m.b(m.a(x).relu_()).relu(), ["a", "b"]),
    "relu6": (lambda m, x: functional.relu6(m.a(x), inplace=True), ["a"]),
    "a slope": (lambda m, x: functional.leaky_relu(m.a(x), 0.3), ["a"]),
    "other modules": (lambda m, x: m.leaky(m.b(m.relu6(m.a(x)))), ["a", "b"]),
    "the last module": (lambda m, x: m.hard_swish(m.a(x)), ["a"]),
    "hard swish": (lambda m, x: functional.hardswish(m.a(x)), ["a"]),
    "an argument by name": (lambda m, x: functional.relu(input=m.a(input=x)), ["a"]),
    "+ on the left": (lambda m, x: m.act(m.a(x) + x), ["a"]),
    "+ on the right": (lambda m, x: m.act(x + m.a(x)), ["a"]),
    "+=": (lambda m, x: m.act(iadd(m.a(x), x)), ["a"]),
    "operator.iadd": (lambda m, x: m.act(call_of(operator.iadd)(m.a(x), x)), ["a"]),
    "torch.add": (lambda m, x: m.act(torch.add(x, m.a(x), alpha=1)), ["a"]),
    "add": (lambda m, x: m.act(x.add(m.a(x))), ["a"]),
    "add_": (lambda m, x: m.act(m.a(x).add_(x)), ["a"]),
    "a sum of layers": (lambda m, x: m.act(m.a(x) + m.b(x.sin())), ["b"]),
    "a sum the other way": (lambda m, x: m.act(m.b(x.sin()) + m.a(x)), ["a"]),
    "+= of layers": (lambda m, x: m.act(iadd(m.a(x), m.b(x.sin()))), ["b"]),
    "what comes later": (lambda m, x: m.act(m.a(x) + x.sin()), ["a"]),
    "a residual of channels": (lambda m, x: m.act(m.a(x) + m.weight), ["a"]),
    "a residual that is wider": (lambda m, x: m.act(m.a(x) + x[None]), ["a"]),
    "a residual of float64": (lambda m, x: m.act(m.a(x) + x.double()), ["a"]),
    "+= of float64": (lambda m, x: m.act(iadd(m.a(x), x.double())), ["a"]),
    "+= into bfloat16": (lambda m, x: m.act(iadd(m.b(x.bfloat16()), m.a(x))), ["a"]),
    "a number": (lambda m, x: m.act(m.a(x) + x.size(0)), ["a"]),
    "a layer in between": (lambda m, x: m.act(m.a(x) + m.b(x).sin()), []),
    "two calls": (lambda m, x: m.act(m.a(m.act(m.a(x)))), []),
    "another user": (lambda m, x: (lambda y: m.act(y) + y)(m.a(x)), []),
    "another user of the sum": (lambda m, x: (lambda y: m.act(y) + y)(m.a(x) + x), []),
    "another name": (with_alias, []),
    "a residual that changes": (written_meanwhile, []),
    "+= into something else": (lambda m, x: m.act(iadd(x.sin(), m.a(x))), []),
    "alpha": (lambda m, x: m.act(torch.add(x, m.a(x), alpha=2)), []),
    "a sum with itself": (lambda m, x: m.act((lambda y: y + y)(m.a(x))), []),
}


@pytest.mark.parametrize("case", FUSED)
@pytest.mark.filterwarnings("ignore:fuse. expected layers")
def test_fused_and_unfused_layers_have_the_bits_of_the_model(case: str) -> None:
    forward, expected = FUSED[case]
    torch.manual_seed(0)
    model = Block(forward)
    alone = copy.deepcopy(model)
    x = torch.randn(4, 3, 5, 4)

    fused = normscope.fuse(model)

    assert fused_layers(fused) == expected
    assert_same(step(fused, x), step(alone, x))


@pytest.mark.parametrize("activate", [lambda m, y: m.silu(y), lambda m, y: functional.silu(y)])
def test_silu_is_fused_with_its_own_rounding(activate: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Block(lambda m, x: activate(m, m.a(x)))
    alone = copy.deepcopy(model)
    x = torch.randn(4, 3, 5, 4)

    fused = normscope.fuse(model)

    assert fused_layers(fused) == ["a"]
    got, expected = step(fused, x), step(alone, x)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)


class Stage(nn.Module):
    """A block of a residual network that adds the shortcut last, with ``+=``."""

    def __init__(self, scope: str) -> None:
        super().__init__()
        self.conv = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.act = nn.ReLU(inplace=True)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.full((4,), 0.5), persistent=False)
        self.unused = nn.ModuleDict({"norm": nn.BatchNorm1d(2)})
        normscope.convert(self, scope)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        x = x - self.mean.view(4, 1, 1)
        if target is not None:
            x = x * target
        y = self.act(self.norm[0](self.conv[0](x)))
        y = self.norm[1](self.conv[1](y))
        y += self.norm[2](self.conv[2](x))
        activated: torch.Tensor = self.act(y)
        return activated


def stage(scope: str = "slices:2") -> Stage:
    torch.manual_seed(0)
    return Stage(scope)


def test_layers_keep_their_order() -> None:
    model, called = stage(), []

    fused = normscope.fuse(model)

    assert fused_layers(fused) == ["norm.0", "norm.2"]
    for name, module in model.norm.named_children():
        module.register_forward_hook(lambda *_, name=name: called.append(f"norm.{name}"))
    model(torch.randn(2, 4, 5, 5))
    calls = [str(n.target) for n in fused.graph.nodes if str(n.target).startswith("norm.")]
    assert calls == called


def step_of_rank(fused_on: list[int]) -> dict[str, torch.Tensor]:
    model: nn.Module = stage("world")
    rank = distributed.get_rank()
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(rank))
    if rank in fused_on:
        model = normscope.fuse(model)
    return step(model, x)


def test_ranks_with_fused_and_unfused_models_make_the_same_exchanges(ranks: RankPool) -> None:
    expected = ranks.run(2, step_of_rank, [])

    for fused_on in ([0, 1], [1]):
        for got, want in zip(ranks.run(2, step_of_rank, fused_on), expected, strict=True):
            assert_same(got, want)


def copies_of(fused: nn.Module) -> list[nn.Module]:
    file = io.BytesIO()
    torch.save(fused, file)
    file.seek(0)
    return [
        copy.deepcopy(fused),
        pickle.loads(pickle.dumps(fused)),
        torch.load(file, weights_only=False),
        copy.deepcopy(pickle.loads(pickle.dumps(copy.deepcopy(fused)))),
    ]


def test_a_fused_model_can_be_copied_pickled_and_saved() -> None:
    model, x = stage(), torch.randn(4, 4, 5, 5)
    fused = normscope.fuse(model)
    fused(x)
    expected = step(copy.deepcopy(model), x)

    for other in copies_of(fused):
        assert fused_layers(other) == fused_layers(fused)
        assert isinstance(other, torch.fx.GraphModule)
        assert list(other.state_dict()) == list(model.state_dict())
        with pytest.raises(ValueError, match="target: expected None, for which the model was fus"):
            other(x, target=x)
        assert_same(step(other, x), expected)


def test_checkpoints_move_both_ways() -> None:
    model, other = stage(), stage()
    fused = normscope.fuse(model)
    step(fused, torch.randn(4, 4, 5, 5))

    other.load_state_dict(fused.state_dict())
    assert list(fused.state_dict()) == list(other.state_dict())
    step(other, torch.randn(4, 4, 5, 5))
    fused.load_state_dict(other.state_dict())

    assert all(map(torch.equal, fused.state_dict().values(), other.state_dict().values()))


def test_a_model_and_its_fused_counterpart_share_their_state() -> None:
    model, x = stage(), torch.randn(4, 4, 5, 5)
    fused = normscope.fuse(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer: Any = model.norm[0]

    fused(x).sum().backward()
    optimizer.step()
    schedule = normscope.ProgressiveScope(model, ["local", "slices:4"], [0, 1])
    schedule.step()

    for (name, ours), theirs in zip(fused.named_parameters(), model.parameters(), strict=True):
        assert ours is theirs, name
    fused_layer: Any = fused.get_submodule("norm.0")
    assert str(fused_layer.scope) == "slices:4"
    assert fused_layer.elements_seen == layer.elements_seen == x.numel()
    fused.double()
    assert layer.running_mean.dtype == model.mean.dtype == torch.float64
    fused.eval()
    assert not layer.training
    assert torch.equal(model.eval()(x.double()), fused(x.double()))
    with pytest.raises(NotImplementedError):
        fused.get_submodule("norm")(x)


def test_scopes_and_statistics_of_a_fused_model_can_be_set() -> None:
    model, x = stage(), torch.randn(4, 4, 5, 5)
    alone = copy.deepcopy(model)
    fused = normscope.fuse(model)

    for each in (fused, alone):
        assert normscope.convert(each, "slices:4") is each
        normscope.estimate_running_stats(each, [x, 2 * x])

    assert len(fused_layers(fused)) == 2
    assert_same(step(fused, x), step(alone, x))


def test_the_original_model_can_be_reverted_and_the_fused_one_cannot() -> None:
    model, x = stage(), torch.randn(4, 4, 5, 5)
    untouched = set(nn.BatchNorm2d(4).__dict__)
    fused = normscope.fuse(model)
    expected = step(copy.deepcopy(fused), x)

    with pytest.raises(TypeError, match=r"norm\.0: .*BatchNormAct2d, which normscope\.fuse made"):
        normscope.revert(fused)
    normscope.revert(model)

    assert type(model.norm[0]) is nn.BatchNorm2d
    assert set(model.norm[0].__dict__) == untouched
    assert fused_layers(fused) == ["norm.0", "norm.2"]
    assert str(fused.get_submodule("norm.0").scope) == "slices:2"
    assert fused.get_submodule("norm.0").weight is model.norm[0].weight
    normscope.convert(model, "slices:2")
    assert_same(step(fused, x), expected)
