# SPDX-License-Identifier: Apache-2.0
"""fuse refuses models that it might change, names the module, and changes nothing."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import normscope


class Head(nn.Module):
    """A layer and an activation, with the forward of a test case."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(3), nn.ReLU()
        self.offset = torch.ones(3, 1, 1)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.seen = 0, list[torch.Tensor]()
        self.run = forward

    def forward(self, x: torch.Tensor) -> Any:  # noqa: ANN401 - depends on the test case
        return self.run(self, x) if self.run else self.act(self.norm(x))


def model_of(forward: Callable[[Any, torch.Tensor], Any] | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), normscope.convert(Head(forward), "slices:2"))


def without_gradients(head: Head, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = head.norm(x)
    return head.act(x)  # type: ignore[no-any-return]


def under_autocast(head: Head, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return head.act(head.norm(x) @ x)  # type: ignore[no-any-return]


def counting(head: Head, x: torch.Tensor) -> torch.Tensor:
    head.calls += 1
    return head.act(head.norm(x))  # type: ignore[no-any-return]


def counting_in_a_buffer(head: Head, x: torch.Tensor) -> torch.Tensor:
    head.count = head.count + 1
    return head.act(head.norm(x))  # type: ignore[no-any-return]


def assigning_to_data(head: Head, x: torch.Tensor) -> torch.Tensor:
    x.data = x.sin()
    return head.act(head.norm(x))  # type: ignore[no-any-return]


TRACED = "expected a forward that torch.fx can trace"
MODES = "expected a forward that leaves gradients, autocast and saved tensors as they are"
TENSORS = "expected a forward whose tensors are inputs, parameters and buffers"
ASSIGNS = "expected a forward that assigns to nothing of its module, got one that assigns to "
TRAINING = "expected a forward that does the same in training and in evaluation, got "

FORWARDS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "data": (lambda m, x: m.act(m.norm(x)) if x.sum() > 0 else x, TRACED),
    "a module made meanwhile": (lambda m, x: nn.ReLU()(m.norm(x)), TRACED),
    "a buffer that is assigned to": (counting_in_a_buffer, f"{ASSIGNS}'count'"),
    "a list": (lambda m, x: m.seen.append(m.norm(x)), f"{ASSIGNS}0"),
    "data that are assigned to": (assigning_to_data, TRACED),
    "dropout": (
        lambda m, x: m.act(m.norm(functional.dropout(x, training=m.training))),
        rf"{TRAINING}dropout\(\w+, p=0\.5, training=True, .* dropout\(\w+, p=0\.5, training=False",
    ),
    "the mode": (lambda m, x: m.norm(x if m.training else x.sin()), rf"{TRAINING}0\.1\.norm"),
    "no_grad": (without_gradients, MODES),
    "autocast": (under_autocast, MODES),
    "checkpoint": (lambda m, x: checkpoint(m.norm, x, use_reentrant=False), MODES),
    "reentrant checkpoint": (lambda m, x: checkpoint(m.norm, x, use_reentrant=True), MODES),
    "random numbers": (lambda m, x: m.act(m.norm(x)) + torch.rand(3, 1, 1), TENSORS),
    "a tensor that is no buffer": (lambda m, x: m.act(m.norm(x) + m.offset), TENSORS),
    "an attribute": (counting, f"{ASSIGNS}'calls'"),
}


def attributes(model: nn.Module) -> list[Any]:
    found = [(id(module), id(v), k) for module in model.modules() for k, v in vars(module).items()]
    lists = [list(module.seen) for module in model.modules() if isinstance(module, Head)]
    return [*found, *map(id, model.buffers()), lists]


@pytest.mark.parametrize("case", FORWARDS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_forward_that_a_graph_would_change_is_refused(case: str) -> None:
    forward, message = FORWARDS[case]
    inner = model_of(forward)
    model = nn.Sequential(inner)
    inner.get_submodule("1.norm").eval()
    before = attributes(model)

    with pytest.raises(RuntimeError, match=rf"^0\.1: {message}.*normscope\.fuse\("):
        normscope.fuse(model)

    assert attributes(model) == before


def test_the_error_of_torch_is_kept() -> None:
    with pytest.raises(RuntimeError) as raised:
        normscope.fuse(Head(FORWARDS["data"][0]))

    assert isinstance(raised.value.__cause__, torch.fx.proxy.TraceError)
    assert str(raised.value).startswith(f"model: {TRACED}")


def test_a_part_can_be_fused_if_the_whole_cannot() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(model_of(), model_of(FORWARDS["data"][0]))
    x = torch.randn(4, 3, 2, 2)
    expected = model(x)

    model[0] = normscope.fuse(model[0])

    assert torch.equal(model(x), expected)
    assert [n for n, m in model.named_modules() if isinstance(m, normscope.BatchNormAct)] == [
        "0.1.norm"
    ]


HOOKS: list[Callable[[nn.Module], Any]] = [
    lambda module: module.register_forward_hook(lambda *_: None),
    lambda module: module.register_forward_pre_hook(lambda *_: None),
    lambda module: module.register_full_backward_hook(lambda *_: None),
    lambda module: module.register_full_backward_pre_hook(lambda *_: None),
]


@pytest.mark.parametrize("number", range(len(HOOKS)))
@pytest.mark.parametrize(
    ("name", "named", "lost"),
    [
        ("1.norm", "1.norm", "would see other values"),
        ("1.act", "1.act", "would see other values"),
        ("1", "1", "a graph would not call"),
        ("", "model", "a graph would not call"),
    ],
)
def test_hooks_that_would_see_other_values_are_refused(
    number: int, name: str, named: str, lost: str
) -> None:
    model = model_of()
    hook = HOOKS[number](model.get_submodule(name))

    with pytest.raises(RuntimeError, match=rf"^{re.escape(named)}: .* hooks, .*{lost}"):
        normscope.fuse(model)

    hook.remove()
    normscope.fuse(model)


def test_hooks_on_other_modules_are_kept() -> None:
    model, seen = model_of(), []
    model[0].register_forward_hook(lambda *_: seen.append("conv"))

    normscope.fuse(model)(torch.randn(2, 3, 4, 4))

    assert seen == ["conv"]


class WithState(Head):
    def get_extra_state(self) -> str:
        return "mine"


def test_a_module_that_overrides_its_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^1: expected a module with the get_extra_state of torch"):
        normscope.fuse(nn.Sequential(nn.Identity(), normscope.convert(WithState())))


def compiled_part() -> nn.Module:
    part: Any = torch.compile(model_of(), backend="eager")
    return nn.Sequential(part)


def compiled_in_place() -> nn.Module:
    model = model_of()
    model[1].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("wrapped", "name", "what"),
    [
        (lambda: nn.DataParallel(model_of()), "model", "DataParallel"),
        (lambda: compiled_part(), "0", "OptimizedModule"),
        (compiled_in_place, "1", "Head"),
    ],
)
def test_a_model_that_is_wrapped_or_compiled_is_refused(
    wrapped: Callable[[], nn.Module], name: str, what: str
) -> None:
    with pytest.raises(TypeError, match=f"^{name}: expected a model before it .*, got .* {what};"):
        normscope.fuse(wrapped())


def test_a_lazy_layer_is_refused_until_it_has_seen_an_input() -> None:
    model = normscope.convert(nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU()), "slices:2")

    with pytest.raises(
        ValueError, match=r"^0: expected a layer that has seen an input, got a Lazy"
    ):
        normscope.fuse(model)

    model(torch.randn(2, 3, 2, 2))
    assert isinstance(normscope.fuse(model).get_submodule("0"), normscope.BatchNormAct2d)


def test_a_single_layer_is_refused() -> None:
    with pytest.raises(TypeError, match="model: expected one whose forward calls layers, got the"):
        normscope.fuse(normscope.BatchNorm2d(3))


def test_a_replaced_forward_is_refused_or_not_fused() -> None:
    model = model_of()
    model.forward = functools.partial(type(model).forward, model)  # type: ignore[method-assign]

    with pytest.raises(
        RuntimeError, match=r"^model: expected a model whose forward is its class's"
    ):
        normscope.fuse(model)

    del model.forward
    model.get_submodule("1.norm").forward = torch.sin
    with pytest.warns(UserWarning, match="an activation follows, got none in Sequential"):
        normscope.fuse(model)


def test_another_activation_for_a_fused_layer_is_refused() -> None:
    model = normscope.convert(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))
    normscope.fuse(model)
    normscope.fuse(model)
    model[1] = nn.SiLU()

    with pytest.raises(RuntimeError, match=r"^0: expected activation relu, with which .* got silu"):
        normscope.fuse(model)


def test_nothing_to_fuse_causes_a_warning() -> None:
    x = torch.randn(4, 3, 2, 2)
    for model, message in (
        (normscope.convert(nn.Sequential(nn.BatchNorm2d(3))), "got none in Sequential$"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), "normscope.convert it first, .* scope to 0$"),
    ):
        with pytest.warns(UserWarning, match=message):
            fused = normscope.fuse(model)
        assert torch.equal(fused(x), model(x))


def test_fusing_twice_warns_and_changes_nothing() -> None:
    fused = normscope.fuse(model_of())
    x = torch.randn(4, 3, 2, 2)

    with pytest.warns(UserWarning, match="got none in Sequential"):
        again = normscope.fuse(fused)

    assert torch.equal(again(x), fused(x))


def test_a_fused_model_can_be_compiled() -> None:
    fused = normscope.fuse(model_of())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own warnings
        compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
        x = torch.randn(4, 3, 2, 2)

        assert torch.equal(compiled(x), fused(x))
