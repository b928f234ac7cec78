# SPDX-License-Identifier: Apache-2.0
"""convert(fuse=True) joins a layer and the activation after it, and the results stay the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import normscope
from normscope.models.sync import SyncBatchNormAct

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "leaky_relu": lambda: nn.LeakyReLU(0.2, inplace=True),
    "leaky_relu that falls": lambda: nn.LeakyReLU(-0.5),
    "silu": nn.SiLU,
    "hard_swish": nn.Hardswish,
}

LAYERS: list[tuple[Callable[[], nn.Module], type[nn.Module], tuple[int, ...]]] = [
    (lambda: nn.BatchNorm1d(3), normscope.BatchNormAct1d, (4, 3)),
    (lambda: nn.BatchNorm1d(3, affine=False), normscope.BatchNormAct1d, (4, 3, 5)),
    (lambda: nn.BatchNorm2d(3, momentum=None), normscope.BatchNormAct2d, (4, 3, 5, 2)),
    (lambda: nn.BatchNorm3d(3, eps=0.1), normscope.BatchNormAct3d, (4, 3, 2, 3, 2)),
    (lambda: nn.SyncBatchNorm(3), SyncBatchNormAct, (4, 3, 5)),
    (lambda: normscope.BatchNorm2d(3, scope="world"), normscope.BatchNormAct2d, (4, 3, 5, 2)),
]


class Block(nn.Sequential):
    """A sequence without a forward of its own."""


class Doubled(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return 2 * y


class Backwards(nn.Sequential):
    def __iter__(self) -> Any:  # noqa: ANN401
        return iter(list(self._modules.values())[::-1])


class OwnReLU(nn.ReLU):
    pass


class OwnNorm(normscope.BatchNorm2d):
    pass


def sequence(*more: nn.Module, act: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), act or nn.ReLU(), *more)


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 5, 2) * 3 + 1


def fused(model: nn.Module, scope: str = "slices:2", **keywords: Any) -> Any:  # noqa: ANN401
    return normscope.convert(model, scope, fuse=True, **keywords)


def names_of_fused(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, normscope.BatchNormAct)]


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


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_results_are_those_of_two_modules(name: str) -> None:
    separate = sequence(nn.Conv2d(3, 2, 1), act=ACTIVATIONS[name]())
    joined = copy.deepcopy(separate)
    normscope.convert(separate, "slices:2")

    fused(joined)

    assert names_of_fused(joined) == ["1"]
    x = batch()
    for _ in range(2):
        got, expected = step(joined, x), step(separate, x)
        if name == "silu":  # in training; the exponential is the library's own
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        else:
            assert_equal(got, expected)


@pytest.mark.parametrize(("layer", "layer_class", "shape"), LAYERS)
def test_each_layer_becomes_the_one_with_an_activation(
    layer: Callable[[], nn.Module], layer_class: type[nn.Module], shape: tuple[int, ...]
) -> None:
    separate = nn.Sequential(layer(), nn.Hardswish())
    joined = copy.deepcopy(separate)
    norm = joined[0]

    fused(joined)

    assert type(joined[0]) is layer_class
    assert joined[0] is norm
    x = torch.randn(shape)
    assert_equal(step(joined, x), step(normscope.convert(separate, "slices:2"), x))


@pytest.mark.own_kernels
def test_the_activation_runs_once_in_a_single_op() -> None:
    model: Any = fused(sequence())

    y = model(batch())

    assert "BatchNorm" in y.grad_fn.name()
    assert isinstance(model[2], nn.Identity)
    assert "ReLU" in repr(model[2])


def test_the_names_and_the_state_stay_the_same() -> None:
    separate = normscope.convert(sequence(nn.Conv2d(3, 2, 1)), "local")
    joined = fused(sequence(nn.Conv2d(3, 2, 1)), "local")
    x = batch()
    step(separate, x)

    assert [name for name, _ in joined.named_modules()] == [
        name for name, _ in separate.named_modules()
    ]
    joined.load_state_dict(separate.state_dict())
    assert_equal(step(joined, x), step(separate, x))
    separate.load_state_dict(joined.state_dict())
    assert list(joined.state_dict()) == list(separate.state_dict())
    assert_equal(step(joined, x), step(separate, x))


def test_revert_restores_exactly_what_was_there() -> None:
    model = sequence(nn.BatchNorm2d(3), nn.LeakyReLU(0.3, inplace=True))
    children = list(model)
    before = [(type(child), list(vars(child))) for child in children]

    normscope.revert(fused(model).eval())

    assert [id(child) for child in model] == [id(child) for child in children]
    assert [(type(child), list(vars(child))) for child in model] == before
    assert {child.training for child in model} == {False}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_work_and_can_be_reverted(copied: Callable[[nn.Module], Any]) -> None:
    model: Any = fused(sequence(act=nn.LeakyReLU(0.3)), "local")
    other = copied(model)
    x = batch()

    assert_equal(step(other, x), step(model, x))
    normscope.revert(other)

    assert type(other[1]) is nn.BatchNorm2d
    assert type(other[2]) is nn.LeakyReLU
    assert other[2].negative_slope == 0.3
    assert names_of_fused(model) == ["1"]
    assert torch.equal(other(x), model(x))


def test_the_layer_alone_cannot_be_reverted() -> None:
    model = sequence()
    inner = fused(nn.Sequential(nn.BatchNorm2d(3), model))

    for alone, name in ((model[1], "model"), (nn.ModuleList([inner[0], model[1]]), "1")):
        with pytest.raises(TypeError, match=rf"^{name}: .* revert the torch.nn.Sequential in whi"):
            normscope.revert(alone)

    assert names_of_fused(inner) == ["1.1"]
    assert isinstance(inner[0], normscope.BatchNorm2d)


def test_a_second_conversion_keeps_the_activation_or_adds_it() -> None:
    model = normscope.convert(sequence(), "local")

    fused(model, "slices:2")
    normscope.convert(model, "slices:4")

    assert names_of_fused(model) == ["1"]
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

    assert [type(child) for child in list(model)[1:]] == [
        nn.BatchNorm2d,
        nn.ReLU,
        nn.BatchNorm2d,
        nn.SiLU,
    ]
    assert (model[2], model[4]) == activations
    assert vars(model[1]).keys() == vars(nn.BatchNorm2d(3)).keys()
    assert torch.equal(model(x), expected)


def test_to_torch_changes_nothing_if_it_raises() -> None:
    model = fused(sequence(OwnNorm(3)))

    with pytest.raises(TypeError, match=r"3: expected a layer of normscope, got .*\.OwnNorm"):
        normscope.to_torch(model)

    assert names_of_fused(model) == ["1"]


def test_patterns_choose_the_layers_that_are_fused() -> None:
    model: Any = nn.Sequential(sequence(), sequence(), sequence())

    fused(model, include=["0.*", "1.*"], exclude="1.1")

    assert names_of_fused(model) == ["0.1"]
    assert type(model[1][1]) is nn.BatchNorm2d
    assert type(model[1][2]) is nn.ReLU


def hooked_pair(kind: str, which: int) -> nn.Module:
    pair = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    getattr(pair[which], f"register_{kind}")(lambda *_: None)
    return pair


def patched(module: nn.Module) -> nn.Module:
    module.forward = lambda x: -x
    return module


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
SEPARATE: dict[str, Callable[[], nn.Module]] = {
    **{f"{kind} of the layer": partial(hooked_pair, kind, 0) for kind in HOOKS},
    **{f"{kind} of the activation": partial(hooked_pair, kind, 1) for kind in HOOKS},
    "a layer with a forward": lambda: nn.Sequential(patched(nn.BatchNorm2d(3)), nn.ReLU()),
    "an activation with a forward": lambda: sequence(act=patched(nn.ReLU())),
    "a subclass of an activation": lambda: sequence(act=OwnReLU()),
    "another activation": lambda: sequence(act=nn.GELU()),
    "a subclass of a layer": lambda: nn.Sequential(OwnNorm(3), nn.ReLU()),
    "a parametrized layer": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.BatchNorm2d(3)), nn.ReLU()
    ),
    "a lazy layer": lambda: nn.Sequential(nn.LazyBatchNorm2d(), nn.ReLU()),
    "something between": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.0), nn.ReLU()),
    "an activation before": lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)),
    "a sequence with a forward of its class": lambda: Doubled(nn.BatchNorm2d(3), nn.ReLU()),
    "a sequence with a forward of its own": lambda: patched(
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    ),
    "a sequence in another order": lambda: Backwards(nn.BatchNorm2d(3), nn.ReLU()),
    "a list": lambda: nn.ModuleList([nn.BatchNorm2d(3), nn.ReLU()]),
}


@pytest.mark.parametrize("what", SEPARATE)
def test_what_would_change_the_model_is_not_fused(what: str) -> None:
    model = SEPARATE[what]()
    children = list(model.modules())

    fused(model)

    assert list(model.modules()) == children
    assert not names_of_fused(model)


def test_modules_that_occur_twice_are_not_fused() -> None:
    act, norm = nn.ReLU(), nn.BatchNorm2d(3)
    model = nn.ModuleList([nn.Sequential(nn.BatchNorm2d(3), act), sequence(act=act)])
    model.append(nn.Sequential(norm, nn.ReLU()))
    model.append(norm)
    model.append(nn.Sequential(norm, nn.ReLU6(), norm, nn.ReLU6()))

    assert not names_of_fused(fused(model))


def test_a_sequence_that_occurs_twice_is_fused() -> None:
    block = Block(nn.BatchNorm2d(3), nn.ReLU())
    separate = nn.Sequential(block, nn.Conv2d(3, 3, 1), block)
    joined = copy.deepcopy(separate)

    fused(joined, "local")

    assert names_of_fused(joined) == ["0.0"]
    x = batch()
    assert_equal(step(joined, x), step(normscope.convert(separate, "local"), x))


def test_a_hook_of_a_fused_layer_is_kept_by_revert_and_to_torch() -> None:
    for undo in (normscope.revert, normscope.to_torch):
        model: Any = fused(sequence())
        called: list[int] = []
        model[1].register_forward_hook(lambda *_, called=called: called.append(1))

        undo(model)(batch())

        assert called == [1]
        assert type(model[2]) is nn.ReLU
