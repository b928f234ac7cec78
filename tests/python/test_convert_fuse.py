# SPDX-License-Identifier: Apache-2.0
"""convert(fuse=True) lets layers apply the activations after them; the results stay the same."""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrizations
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

import normscope

pytestmark = pytest.mark.portable

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "leaky_relu": lambda: nn.LeakyReLU(0.2, inplace=True),
    "leaky_relu that falls": lambda: nn.LeakyReLU(-0.5),
    "silu": nn.SiLU,
    "hard_swish": nn.Hardswish,
}

LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.BatchNorm1d(3), (4, 3)),
    (lambda: nn.BatchNorm1d(3, affine=False), (4, 3, 5)),
    (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 5, 2)),
    (lambda: nn.BatchNorm3d(3, eps=0.1), (4, 3, 2, 3, 2)),
    (lambda: nn.SyncBatchNorm(3), (4, 3, 5)),
    (lambda: normscope.BatchNorm2d(3, scope="world"), (4, 3, 5, 2)),
    (lambda: OwnNorm(3), (4, 3, 5, 2)),
    (lambda: parametrizations.weight_norm(nn.BatchNorm2d(3)), (4, 3, 5, 2)),
]


class Block(nn.Sequential):
    """A sequence without a forward of its own."""


class Doubled(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return 2 * y


class Backwards(nn.Sequential):
    def __iter__(self) -> Any:
        return iter(list(self._modules.values())[::-1])


class OwnReLU(nn.ReLU):
    pass


class OwnNorm(normscope.BatchNorm2d):
    pass


class Halved(normscope.BatchNorm2d):
    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input, mask) / 2


def sequence(*more: nn.Module, act: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), act or nn.ReLU(), *more)


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 5, 2) * 3 + 1


def fused(model: nn.Module, scope: str = "slices:2", **keywords: Any) -> Any:
    return normscope.convert(model, scope, fuse=True, **keywords)


@contextmanager
def calls_of_activations() -> Iterator[list[nn.Module]]:
    """Keep a list of the activations that are called."""
    called: list[nn.Module] = []
    with ExitStack() as stack:
        for kind in {type(make()) for make in ACTIVATIONS.values()} | {nn.GELU}:
            forward = kind.forward

            def recording(module: nn.Module, x: torch.Tensor, forward: Any = forward) -> Any:
                called.append(module)
                return forward(module, x)

            stack.enter_context(mock.patch.object(kind, "forward", recording))
        yield called


def left_out(model: nn.Module, x: torch.Tensor) -> list[str]:
    """Return the names of the activations that a training forward does not call."""
    kinds = tuple({type(make()) for make in ACTIVATIONS.values()})
    with calls_of_activations() as called:
        model.train()(x)
    return [n for n, m in model.named_modules() if isinstance(m, kinds) and m not in called]


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return all results of a training step, and the output of evaluation after it."""
    leaf = x.clone().requires_grad_()
    y = model.train()(leaf)
    found = torch.autograd.grad(y.sin().sum(), [leaf, *model.parameters()])
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [y.detach(), *found, *buffers, model.eval()(x).detach()]


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), number


@pytest.mark.parametrize(
    ("layer", "shape", "name"),
    [
        *((lambda: nn.BatchNorm2d(3), (4, 3, 5, 2), name) for name in ACTIVATIONS),
        *((layer, shape, "hard_swish") for layer, shape in LAYERS),
    ],
)
def test_the_modules_remain_and_have_the_results_of_two(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], name: str
) -> None:
    separate = nn.Sequential(nn.Identity(), layer(), ACTIVATIONS[name](), nn.Identity())
    joined = copy.deepcopy(separate)
    children = list(joined)
    normscope.convert(separate, "slices:2")

    fused(joined)

    assert [id(child) for child in joined] == [id(child) for child in children]
    assert [vars(type(m)).keys() for m in joined] == [vars(type(m)).keys() for m in separate]
    assert isinstance(joined, nn.Sequential)
    x = torch.randn(shape)
    assert left_out(copy.deepcopy(joined), x) == ["2"]
    for _ in range(2):
        got, expected = step(joined, x), step(separate, x)
        if name == "silu":  # in training; the exponential is the library's own
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert_equal(got, expected)


def test_torch_lists_the_classes_that_a_file_of_a_whole_model_needs() -> None:
    model: Any = fused(sequence(nn.LeakyReLU(0.3)), "local")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    names = [name.rpartition(".") for name in get_unsafe_globals_in_checkpoint(file)]
    classes = [getattr(importlib.import_module(module), name) for module, _, name in names]
    file.seek(0)

    with safe_globals(classes):
        loaded = torch.load(file, weights_only=True)

    assert type(loaded) is type(model)
    x = batch()
    assert_equal(step(loaded, x), step(model, x))


def test_a_part_of_a_sequence_is_one_that_fuses() -> None:
    model: Any = fused(sequence(nn.Conv2d(3, 2, 1)), "local")
    x = batch()

    assert left_out(model[:3], x) == ["2"]
    assert torch.equal(model[:2](x), model[1](model[0](x)))
    assert torch.equal(nn.Sequential(*list(model)[:3])(x), model[:3](x))


def test_a_layer_alone_applies_no_activation_and_can_be_reverted() -> None:
    model: Any = fused(sequence(), "local")
    x = batch()

    y = model[1](x)

    assert (y < 0).any()
    assert type(normscope.revert(model[1])) is nn.BatchNorm2d
    assert torch.equal(model(x), model[1](model[0](x)).relu())
    assert vars(model[1]).keys() == vars(nn.BatchNorm2d(3)).keys()


def test_a_second_conversion_keeps_the_activation_or_adds_it() -> None:
    model = normscope.convert(sequence(), "local")

    fused(model, "slices:2")
    normscope.convert(model, "slices:4")

    assert left_out(model, batch()) == ["2"]
    assert str(model[1].scope) == "slices:4"
    assert type(normscope.revert(model)[1]) is nn.BatchNorm2d


@pytest.mark.parametrize("layer", [nn.BatchNorm2d, nn.SyncBatchNorm, normscope.BatchNorm2d])
def test_to_torch_splits_the_two(layer: type[nn.Module]) -> None:
    model = sequence(layer(3), nn.SiLU())
    activations = (model[2], model[4])
    fused(model, "local")(batch())
    x = batch()
    expected = model.eval()(x)

    normscope.to_torch(model, any_dims=nn.BatchNorm2d)

    assert type(model) is nn.Sequential
    assert [type(model[index]) for index in (1, 3)] == [nn.BatchNorm2d] * 2
    assert (model[2], model[4]) == activations
    assert vars(model[1]).keys() == vars(nn.BatchNorm2d(3)).keys()
    assert torch.equal(model(x), expected)


def test_patterns_choose_the_layers_that_are_fused() -> None:
    model: Any = nn.Sequential(sequence(), sequence(), sequence())

    fused(model, include=["0.*", "1.*"], exclude="1.1")

    assert left_out(model, batch()) == ["0.2"]
    assert type(model[1][1]) is nn.BatchNorm2d
    assert type(model[2]) is nn.Sequential


def patched(module: nn.Module) -> nn.Module:
    module.forward = lambda x: -x
    return module


SEPARATE: dict[str, Callable[[], nn.Module]] = {
    "a layer with a forward of its class": lambda: nn.Sequential(Halved(3), nn.ReLU()),
    "a layer with a forward": lambda: nn.Sequential(patched(nn.BatchNorm2d(3)), nn.ReLU()),
    "an activation with a forward": lambda: sequence(act=patched(nn.ReLU())),
    "a subclass of an activation": lambda: sequence(act=OwnReLU()),
    "another activation": lambda: sequence(act=nn.GELU()),
    "something between": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.0), nn.ReLU()),
    "an activation before": lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)),
    "a sequence with a forward of its class": lambda: Doubled(nn.BatchNorm2d(3), nn.ReLU()),
    "a sequence with a forward of its own": lambda: patched(
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    ),
    "a sequence in another order": lambda: Backwards(nn.BatchNorm2d(3), nn.ReLU()),
}


@pytest.mark.parametrize("what", SEPARATE)
def test_what_would_change_the_model_is_not_fused(what: str) -> None:
    separate = SEPARATE[what]()
    joined = fused(copy.deepcopy(separate))
    normscope.convert(separate, "slices:2")
    x = batch()

    with calls_of_activations() as expected:
        y = separate(x)
    with calls_of_activations() as called:
        got = joined(x)

    assert torch.equal(got, y)
    assert len(called) == len(expected)


def test_modules_that_occur_twice_are_fused_where_they_follow_each_other() -> None:
    act, norm = nn.ReLU(), nn.BatchNorm2d(3)
    block = Block(nn.BatchNorm2d(3), act)
    separate = nn.Sequential(block, norm, act, norm, block, nn.Sequential(norm, nn.LeakyReLU()))
    joined = copy.deepcopy(separate)

    fused(joined, "local")

    x = batch()
    assert left_out(copy.deepcopy(joined), x) == ["0.1", "5.1"]  # names of the first occurrences
    assert_equal(step(joined, x), step(normscope.convert(separate, "local"), x))


class Frozen(nn.Module):
    """A layer that only evaluates, as detection libraries make of one of torch."""

    def __init__(self, layer: nn.BatchNorm2d) -> None:
        super().__init__()
        self.layer = nn.BatchNorm2d(layer.num_features, layer.eps).eval()
        self.layer.load_state_dict(layer.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


def frozen(model: nn.Module) -> nn.Module:
    for name, child in list(model.named_modules()):
        if isinstance(child, nn.BatchNorm2d):
            model.set_submodule(name, Frozen(child))
    return model


def as_mkldnn(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses torch.jit
        from torch.utils import mkldnn

        converted: nn.Module = mkldnn.to_mkldnn(model)
    return lambda x: converted(x.to_mkldnn()).to_dense()


TOOLS: dict[str, Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "torch.nn.SyncBatchNorm": nn.SyncBatchNorm.convert_sync_batchnorm,
    "frozen": frozen,
    "mkldnn": as_mkldnn,
    "torch.fx": fx.symbolic_trace,
    "a part": lambda model: nn.Sequential(*frozen(model)[:3]),  # type: ignore[index]
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_that_replace_layers_keep_the_activations(tool: str) -> None:
    model = sequence(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.ReLU())
    model(batch())
    fused(model.eval(), "local")
    x = batch()
    expected = model[:3](x) if tool == "a part" else model(x)

    got = TOOLS[tool](model)(x)

    # The order of a few operations on values of order one differs.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


def recorded(model: nn.Module, which: int, kind: str) -> list[torch.Tensor]:
    """Return the last arguments of a hook of one of the modules, and the results of a step."""
    seen: list[torch.Tensor] = []

    def hook(_: nn.Module, *values: Any) -> None:
        value = values[-1]
        seen.append((value[0] if isinstance(value, tuple) else value).detach().clone())

    handle = getattr(model[which], kind)(hook)  # type: ignore[index]
    results = step(model, batch())
    handle.remove()
    return [*seen, *results]


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_layers_and_activations_run(kind: str, which: int) -> None:
    separate = normscope.convert(sequence(), "local")
    joined = copy.deepcopy(separate)
    handle = getattr(joined[which], kind)(lambda *_: None)
    fused(joined, "local")
    handle.remove()

    torch.manual_seed(1)
    expected = recorded(separate, which, kind)
    torch.manual_seed(1)
    assert_equal(recorded(joined, which, kind), expected)
    assert left_out(joined, batch()) == ["2"]


def test_hooks_of_all_modules_run() -> None:
    model = fused(sequence())
    seen: list[type] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))

    model(batch())
    handle.remove()

    assert seen == [nn.Conv2d, normscope.BatchNorm2d, nn.ReLU, type(model)]


@pytest.mark.usefixtures("quiet_compiler")
def test_a_compiled_layer_is_called() -> None:
    model: Any = fused(sequence(), "local")
    graphs = CompileCounterWithBackend("eager")
    model[1].compile(backend=graphs)

    model(batch())

    assert graphs.frame_count == 1


def test_a_hook_of_a_fused_layer_is_kept_by_revert_and_to_torch() -> None:
    for undo in (normscope.revert, normscope.to_torch):
        model: Any = fused(sequence())
        called: list[int] = []
        model[1].register_forward_hook(lambda *_, called=called: called.append(1))

        undo(model)(batch())

        assert called == [1]
        assert type(model[2]) is nn.ReLU
