# SPDX-License-Identifier: Apache-2.0
"""convert gives every layer a scope and loses nothing; revert undoes it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from oracle import needs_bias_argument
from torch import nn

import normscope

TORCH_LAYERS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]


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


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


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


@pytest.mark.parametrize("layer_class", TORCH_LAYERS)
def test_revert_restores_the_classes_and_attributes(layer_class: type[nn.Module]) -> None:
    model = nn.Sequential(layer_class(3), normscope.BatchNorm2d(3, scope="local"))
    before_classes, before_ids = classes(model), identities(model)
    before_attributes = [dict(layer.__dict__) for layer in model]

    normscope.convert(model, "world")
    normscope.convert(model, "slices:4")
    assert [str(layer.scope) for layer in model] == ["slices:4", "slices:4"]
    normscope.revert(model)

    assert classes(model) == before_classes
    assert identities(model) == before_ids
    assert [layer.__dict__.keys() - {"_earlier_scopes"} for layer in model] == [
        a.keys() for a in before_attributes
    ]
    assert str(model[1].scope) == "local"
    normscope.revert(model)
    assert classes(model) == before_classes


def test_patterns_select_layers_by_name() -> None:
    model = Block()

    normscope.convert(model, include=["head.*", "norm"], exclude="head.1")

    assert type(model.norm) is normscope.BatchNorm2d
    assert type(model.head[0]) is normscope.BatchNorm2d
    assert type(model.head[1]) is nn.BatchNorm1d


def test_a_layer_that_cannot_be_converted_can_be_left_out() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Centred(3)))

    normscope.convert(model, exclude="1.0")

    assert type(model.get_submodule("1.0")) is Centred
    assert type(model[0]) is normscope.BatchNorm2d


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


def copies_of(layer: nn.Module) -> list[nn.Module]:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return [
        copy.deepcopy(layer),
        copy.copy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ]


@pytest.mark.parametrize("converted", [True, False])
def test_a_layer_keeps_its_scope_when_copied_pickled_and_saved(*, converted: bool) -> None:
    if converted:
        model = normscope.convert(nn.Sequential(nn.BatchNorm2d(3)), "slices:3")
        layer = model.get_submodule("0")
    else:
        layer = normscope.BatchNorm2d(3, scope="slices:3", slice_stats="first")
    layer(torch.randn(6, 3, 2, 2))

    for other in copies_of(layer):
        assert type(other) is normscope.BatchNorm2d
        assert other.scope == layer.scope
        assert other.slice_stats == layer.slice_stats
        assert other.layer_name == layer.layer_name
        x = torch.randn(6, 3, 2, 2)
        assert torch.equal(other(x), layer(x))


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


def parameters_after_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bool]:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]


def test_an_optimizer_made_before_conversion_still_works() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())

    normscope.convert(model, "local")
    assert all(parameters_after_training(model, optimizer))
    normscope.revert(model)

    assert all(parameters_after_training(model, optimizer))


class CentredScoped(normscope.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # no masks
        return super().forward(input) - 0.5


def test_a_subclass_of_a_scoped_layer_keeps_its_class() -> None:
    model = nn.Sequential(CentredScoped(3, scope="local", slice_stats="first"))

    normscope.convert(model, "slices:2")
    assert type(model[0]) is CentredScoped
    assert (str(model[0].scope), model[0].slice_stats) == ("slices:2", "first")
    normscope.revert(model)

    assert type(model[0]) is CentredScoped
    assert str(model[0].scope) == "local"


@pytest.mark.parametrize("exclude", [None, "0"])
def test_a_model_with_nothing_to_convert_causes_a_warning(exclude: str | None) -> None:
    model = nn.Sequential(nn.Linear(3, 3) if exclude is None else nn.BatchNorm1d(3))

    with pytest.warns(UserWarning, match="layers to convert, got none in Sequential"):
        assert normscope.convert(model, exclude=exclude) is model


LAZY_LAYERS = [
    (nn.LazyBatchNorm1d, normscope.BatchNorm1d, nn.BatchNorm1d, (4, 3)),
    (nn.LazyBatchNorm2d, normscope.BatchNorm2d, nn.BatchNorm2d, (4, 3, 2, 2)),
    (nn.LazyBatchNorm3d, normscope.BatchNorm3d, nn.BatchNorm3d, (4, 3, 2, 2, 2)),
]


@pytest.mark.parametrize(("lazy", "scoped", "plain", "shape"), LAZY_LAYERS)
def test_a_lazy_layer_materializes_with_its_scope(
    lazy: type[nn.Module], scoped: type[nn.Module], plain: type[nn.Module], shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(lazy(momentum=0.5, dtype=torch.float64))
    weight = model[0].weight
    normscope.convert(model, "slices:2")
    x = torch.randn(shape, dtype=torch.float64)
    expected = normscope.BatchNorm(3, momentum=0.5, dtype=torch.float64, scope="slices:2")

    y = model(x)  # the first forward already uses the scope

    layer: Any = model[0]
    assert (str(layer.scope), layer.layer_name) == ("slices:2", "0")
    assert layer.weight is weight
    assert torch.equal(y, expected(x))
    assert torch.equal(layer.running_var, expected.get_buffer("running_var"))
    assert type(layer) is scoped
    normscope.revert(model)
    assert type(model[0]) is plain


@pytest.mark.parametrize("lazy", [nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d])
def test_a_lazy_layer_reverts_to_torch_s_class(lazy: type[nn.Module]) -> None:
    layer, untouched = lazy(), lazy()

    assert isinstance(normscope.convert(layer), lazy)
    normscope.revert(layer)

    assert type(layer) is lazy
    assert layer.__dict__.keys() == untouched.__dict__.keys()


def test_a_pickled_lazy_layer_materializes_with_its_scope() -> None:
    layer = normscope.convert(nn.LazyBatchNorm2d(), "slices:3")

    other = pickle.loads(pickle.dumps(layer))
    other(torch.randn(6, 3, 2, 2))

    assert type(other) is normscope.BatchNorm2d
    assert str(other.scope) == "slices:3"
    assert type(normscope.revert(other)) is nn.BatchNorm2d


def test_a_lazy_checkpoint_of_torch_loads() -> None:
    layer, trained = normscope.convert(nn.LazyBatchNorm1d()), nn.BatchNorm1d(3)
    trained(torch.randn(4, 3))

    layer.load_state_dict(trained.state_dict())

    assert torch.equal(layer.get_buffer("running_mean"), trained.get_buffer("running_mean"))


def test_copies_of_a_trained_model_can_be_reverted() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3))
    before = [set(layer.__dict__) for layer in plain]
    model = normscope.convert(plain, "slices:2")
    model(torch.randn(4, 3, 2, 2))
    normscope.set_scope(model, "local")

    others: list[Any] = [*copies_of(model), model]
    for other in others:
        state = copy.deepcopy(other.state_dict())
        normscope.revert(other)
        assert [type(layer) for layer in other] == [nn.BatchNorm2d, nn.SyncBatchNorm]
        assert [set(layer.__dict__) for layer in other] == before
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_an_averaged_model_keeps_its_scope_and_averages() -> None:
    model: Any = normscope.convert(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), "slices:2")
    averaged: Any = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights, means = [], []
    for _ in range(3):
        parameters_after_training(model, optimizer)
        averaged.update_parameters(model)
        weights.append(model[0].weight.detach().clone())
        means.append(model[0].running_mean.clone())

    average = averaged.module[0]
    assert type(average) is normscope.BatchNorm1d
    assert str(average.scope) == "slices:2"
    # The mean of three numbers of order one, in float32 (eps 1.2e-7).
    torch.testing.assert_close(average.weight, sum(weights) / 3, rtol=0, atol=1e-6)
    torch.testing.assert_close(average.running_mean, sum(means) / 3, rtol=0, atol=1e-6)
    torch.optim.swa_utils.update_bn([torch.randn(8, 3)], averaged)
    assert average.num_batches_tracked == 1
