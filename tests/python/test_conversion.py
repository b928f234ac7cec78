# SPDX-License-Identifier: Apache-2.0
"""convert gives every layer a scope and loses nothing; revert undoes it."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import needs_bias_argument
from torch import nn

import normscope


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=None, eps=1e-3)
        self.alias = self.norm
        self.head = nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.BatchNorm1d(4))


class Centred(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) - 0.5


def identities(model: nn.Module) -> dict[str, int]:
    """Return the ids of everything in a model that must remain the same object."""
    found = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    found |= {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    return found | {name: id(t) for name, t in model.named_buffers(remove_duplicate=False)}


def test_layers_remain_the_same_objects() -> None:
    model = Block()
    model.norm.eval()
    model.norm.weight.requires_grad_(False)  # noqa: FBT003 - torch's signature
    before = identities(model)

    assert normscope.convert(model, "slices:2") is model

    assert identities(model) == before
    assert type(model.norm) is normscope.BatchNorm2d
    assert type(model.head[1]) is normscope.BatchNorm1d
    assert model.alias is model.norm
    assert not model.norm.training
    assert model.head[0].training
    assert not model.norm.weight.requires_grad
    assert (model.norm.momentum, model.norm.eps) == (None, 1e-3)
    assert model.norm.layer_name == "norm"
    assert model.head[1].layer_name == "head.1"
    assert isinstance(model.norm, nn.BatchNorm2d)


def test_hooks_are_kept() -> None:
    model = Block()
    called = []
    model.norm.register_forward_hook(lambda *_: called.append("forward"))
    model.norm.register_full_backward_hook(lambda *_: called.append("backward"))
    model.norm.register_state_dict_post_hook(lambda *_: called.append("state"))

    normscope.convert(model)
    model.norm(torch.randn(2, 4, 3, 3).requires_grad_()).sum().backward()
    model.state_dict()

    assert called[:2] == ["forward", "backward"]
    assert "state" in called


class CentredScoped(normscope.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # no masks
        return super().forward(input) - 0.5


# Layers, and the number of dimensions of their inputs.
LAYERS: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: nn.BatchNorm1d(3), 2),
    (lambda: nn.BatchNorm2d(3), 4),
    (lambda: nn.BatchNorm3d(3), 5),
    (lambda: nn.SyncBatchNorm(3), 3),
    (lambda: normscope.BatchNorm2d(3, scope="local", slice_stats="first"), 4),
    (lambda: normscope.BatchNormAct2d(3, scope="local", activation="silu"), 4),
    (lambda: CentredScoped(3, scope="local", slice_stats="first"), 4),
]


def modules_of(model: nn.Module) -> list[tuple[type, set[str], str, str]]:
    """Return the class, attributes, scope and kind of statistics of each module."""
    return [
        (
            type(module),
            vars(module).keys() - {"_earlier_scopes"},
            str(getattr(module, "scope", "")),
            getattr(module, "slice_stats", ""),
        )
        for module in model.modules()
    ]


def copies_of(model: nn.Module) -> list[Any]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return [
        copy.deepcopy(model),
        torch.optim.swa_utils.AveragedModel(model).module,
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize(("make", "dims"), LAYERS)
def test_a_layer_keeps_its_scope_in_copies_and_can_be_reverted(
    make: Callable[[], nn.Module], dims: int, *, fuse: bool
) -> None:
    model: Any = nn.Sequential(make(), nn.ReLU())
    objects, modules = identities(model), modules_of(model)
    original = type(model[0])

    normscope.convert(model, "world", fuse=fuse)
    normscope.convert(model, "slices:3")

    assert identities(model) == objects
    assert isinstance(model[0], normscope.BatchNorm)
    assert isinstance(model[0], original)
    assert type(model[0]).__name__ == original.__name__  # which some tools compare
    assert type(model[1]) is nn.ReLU
    x, other = torch.randn(2, 6, 3, *[2] * (dims - 2))
    model(x)
    converted = modules_of(model)
    copies = copies_of(model)
    y = model(other)
    assert torch.equal(copy.copy(model[0])(x), copy.deepcopy(model[0])(x))
    for each in copies:
        assert modules_of(each) == converted
        assert each[0].layer_name == "0"
        assert torch.equal(each(other), y)
    for each in (*copies, model):
        state = copy.deepcopy(each.state_dict())
        normscope.revert(each)
        assert modules_of(each) == modules
        assert all(torch.equal(value, state[name]) for name, value in each.state_dict().items())
    assert identities(normscope.revert(model)) == objects


def test_patterns_select_layers_by_name() -> None:
    model = nn.Sequential(Block(), Centred(3))  # which cannot be converted

    normscope.convert(model, include=["0.head.*", "0.norm", "1"], exclude=["0.head.1", "1"])

    layers = [model.get_submodule(name) for name in ("0.norm", "0.head.0", "0.head.1", "1")]
    scoped = [normscope.BatchNorm2d] * 2
    assert [type(layer) for layer in layers] == [*scoped, nn.BatchNorm1d, Centred]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("keywords", [{}, {"affine": False}, {"track_running_stats": False}])
def test_checkpoints_move_both_ways(momentum: float | None, keywords: dict[str, Any]) -> None:
    theirs, ours = (
        nn.BatchNorm2d(3, momentum=momentum, **keywords),
        normscope.BatchNorm2d(3, **keywords),
    )
    theirs(torch.randn(4, 3, 5, 5))

    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours(torch.randn(4, 3, 5, 5))
    theirs.load_state_dict(ours.state_dict(), strict=True)

    assert list(theirs.state_dict()) == list(ours.state_dict())
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])
        assert value.dtype == theirs.state_dict()[name].dtype


def test_the_layers_take_every_argument_of_torch_in_the_same_order() -> None:
    for ours, theirs in (
        (normscope.BatchNorm1d, nn.BatchNorm1d),
        (normscope.BatchNorm2d, nn.BatchNorm2d),
        (normscope.BatchNorm3d, nn.BatchNorm3d),
    ):
        arguments = (5, 1e-3, 0.2, True, True, "cpu", torch.float64)
        a, b = ours(*arguments), theirs(*arguments)
        assert repr(a) == repr(b)[:-1] + ", scope=world)"
        assert all(p.dtype == torch.float64 for p in a.parameters())


@needs_bias_argument
def test_a_layer_without_bias_has_none() -> None:
    assert normscope.BatchNorm2d(5, bias=False).bias is None


@pytest.mark.parametrize("exclude", [None, "0"])
def test_a_model_with_nothing_to_convert_causes_a_warning(exclude: str | None) -> None:
    model = nn.Sequential(nn.Linear(3, 3) if exclude is None else nn.BatchNorm1d(3))

    with pytest.warns(UserWarning, match="layers to convert, got none in Sequential"):
        assert normscope.convert(model, exclude=exclude) is model


@pytest.mark.parametrize(
    ("lazy", "plain", "shape"),
    [
        (nn.LazyBatchNorm1d, nn.BatchNorm1d, (4, 3)),
        (nn.LazyBatchNorm2d, nn.BatchNorm2d, (4, 3, 2, 2)),
        (nn.LazyBatchNorm3d, nn.BatchNorm3d, (4, 3, 2, 2, 2)),
    ],
)
def test_a_lazy_layer_materializes_with_its_scope_or_reverts(
    lazy: type[nn.Module], plain: type[nn.Module], shape: tuple[int, ...]
) -> None:
    model: Any = nn.Sequential(lazy(momentum=0.5))
    weight, attributes = model[0].weight, set(vars(model[0]))
    normscope.convert(model, "slices:2")
    assert isinstance(model[0], lazy)
    pickled, reverted = (pickle.loads(pickle.dumps(model)) for _ in range(2))
    [lazy_again] = normscope.revert(reverted)
    x = torch.randn(shape)
    expected = normscope.BatchNorm(3, momentum=0.5, scope="slices:2")
    y = expected(x)

    for each in (pickled, model):
        assert torch.equal(each(x), y)  # the first forward already uses the scope
        assert (str(each[0].scope), each[0].layer_name) == ("slices:2", "0")
        assert torch.equal(each[0].running_var, expected.get_buffer("running_var"))
        assert type(each[0]) is getattr(normscope, plain.__name__)
        assert type(normscope.revert(each)[0]) is plain
    assert model[0].weight is weight
    assert type(lazy_again) is lazy
    assert set(vars(lazy_again)) == attributes


def test_a_lazy_checkpoint_of_torch_loads() -> None:
    layer, trained = normscope.convert(nn.LazyBatchNorm1d()), nn.BatchNorm1d(3)
    trained(torch.randn(4, 3))

    layer.load_state_dict(trained.state_dict())

    assert torch.equal(layer.get_buffer("running_mean"), trained.get_buffer("running_mean"))
