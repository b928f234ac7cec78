# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of convert, revert, to_torch, register_conversion and torch.fx.

Errors say what was expected and given; a refused call changes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from refusals import Refusal, assert_refused
from torch import distributed, fx, nn
from torch.nn.utils import parametrizations

import normscope


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) - 0.5


class OwnMembers(nn.BatchNorm2d):
    label = "own"


class ScopedOwnForward(normscope.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # no masks
        return super().forward(input) - 0.5


class Registered(nn.BatchNorm2d):
    pass


class ScopedRegistered(Registered, normscope.BatchNorm2d):
    pass


class Further(Registered):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


class WithModule(nn.BatchNorm2d):
    pass


class Synchronized(nn.SyncBatchNorm):
    pass


class ScopedSynchronized(Synchronized, normscope.SyncBatchNorm):
    pass


class Layer(nn.BatchNorm2d):
    pass


class Scoped(Layer, normscope.BatchNorm2d):
    pass


normscope.register_conversion(
    Registered, ScopedRegistered, attributes=lambda _: {"label": "of the layer"}
)
normscope.register_conversion(Synchronized, ScopedSynchronized)
normscope.register_conversion(
    WithModule, normscope.BatchNorm2d, attributes=lambda _: {"act": nn.ReLU()}
)


def of_another_class() -> nn.Module:
    model = normscope.convert(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)))
    model[1].__class__ = ScopedOwnForward
    return model


def two_norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))


def block() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3))


def traced(model: nn.Module) -> Any:
    return torch.jit.trace(model, torch.randn(4, 3), check_trace=False)


def with_hook() -> nn.Module:
    layer = normscope.BatchNormAct2d(3)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(normscope.BatchNorm2d(3), layer)


def fused() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), ScopedOwnForward(3))
    return normscope.convert(model, fuse=True)


def of_another_group() -> nn.Module:
    others = distributed.GroupMember.NON_GROUP_MEMBER
    return nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3, process_group=others))


def of_a_group_that_is_gone() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), Synchronized(3))
    vars(normscope.convert(model, fuse=True)[2])["group_name"] = "gone"
    return model


CONVERSIONS: list[Refusal] = [
    (of_another_group, normscope.convert, ValueError, "expected a process group or mesh that this"),
    *(
        (of_a_group_that_is_gone, undo, RuntimeError, "2: expected its process group, gone, in")
        for undo in (normscope.revert, normscope.to_torch)
    ),
    *(
        (make, normscope.convert, TypeError, message)
        for make, message in [
            (
                lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(OwnForward(3))),
                r"1\.0: expected a layer .*got .*\.OwnForward",
            ),
            (
                lambda: nn.Sequential(OwnMembers(3)),
                r"0: .*\.OwnMembers, whose own members would be lost; derive it from normscope\."
                r"BatchNorm2d instead of torch\.nn\.BatchNorm2d, say what becomes of it with "
                r"normscope\.register_conversion, or leave it out with exclude='0'",
            ),
            (
                lambda: nn.Sequential(Further(3)),
                "0: .*Further, whose own forward would be lost; .*regist",
            ),
            (
                lambda: nn.Sequential(nn.BatchNorm2d(3), WithModule(3)),
                "WithModule: expected plain .*, got act, a R",
            ),
            *(
                (
                    lambda compiled=compiled: nn.Sequential(nn.BatchNorm1d(3), compiled(block())),
                    r"1\.0: expected .* got one in training that torch\.jit",
                )
                for compiled in (torch.jit.script, traced)
            ),
        ]
    ),
    *(
        (make, normscope.to_torch, TypeError, message)
        for make, message in [
            (fused, r"2: expected a layer of normscope, got .*\.ScopedOwnForward"),
            (
                lambda: nn.Sequential(normscope.BatchNorm2d(3), nn.Sequential(ScopedOwnForward(3))),
                r"1\.0: expected a layer of normscope, got .*\.ScopedOwnForward",
            ),
            (
                lambda: nn.Sequential(parametrizations.weight_norm(normscope.BatchNormAct2d(3))),
                "got .*ParametrizedBatchNormAct2d; call to_torch before",
            ),
        ]
    ),
    (with_hook, normscope.to_torch, RuntimeError, "1: expected a layer without forward or back"),
    *(
        (two_norms, call, ValueError, message)
        for call, message in [
            (partial(normscope.convert, include=["0", "a"]), r"include: .*\('0', '2'\), got 'a'"),
            (partial(normscope.convert, exclude="1"), "exclude: .* got '1'"),
        ]
    ),
    (
        of_another_class,
        normscope.revert,
        TypeError,
        r"1: .* class that convert gave it, got .*\.Scop",
    ),
    *(
        (make, fx.symbolic_trace, TypeError, message)
        for make, message in [
            (lambda: normscope.BatchNorm2d(3), "root: expected a model that has the layer, got"),
            (
                lambda: nn.Sequential(ScopedOwnForward(3)),
                "0: expected a layer with a forward of normscope, got a S",
            ),
        ]
    ),
]


REGISTRATIONS: list[tuple[Any, Any, type[Exception], str]] = [
    (nn.Linear, Scoped, TypeError, "layer_class: .* torch's batch norm.*, got .*Linear$"),
    (Layer(3), Scoped, TypeError, r"layer_class: .*, got Layer\(3"),
    (Scoped, Scoped, TypeError, "layer_class: .*Scoped, whose layers have a scope"),
    (Layer, nn.BatchNorm2d, TypeError, r"scoped_class: .* normscope\.BatchNorm2d for layers"),
    (Layer, normscope.BatchNorm1d, TypeError, r"normscope\.BatchNorm2d .*\.BatchNorm1d$"),
    (Layer, None, TypeError, "scoped_class: .*, got None"),
    (Registered, normscope.BatchNorm2d, ValueError, ".*Registered, which is registered for .*Scop"),
    (nn.BatchNorm2d, Scoped, ValueError, r"registered for normscope\..*\.BatchNorm2d"),
    (Registered, ScopedRegistered, ValueError, "Registered, .* registered with other attributes"),
]


@pytest.mark.parametrize(("layer_class", "scoped_class", "error", "message"), REGISTRATIONS)
def test_a_registration_is_refused_and_changes_nothing(
    layer_class: Any, scoped_class: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        normscope.register_conversion(layer_class, scoped_class)

    with pytest.raises(TypeError, match="Layer, whose own members would be lost"):
        normscope.convert(Layer(3))


def test_attributes_of_a_registration_are_made_by_a_function() -> None:
    attributes: Any = {"activation": "relu"}
    with pytest.raises(TypeError, match="attributes: expected a function of a layer, got dict"):
        normscope.register_conversion(Layer, Scoped, attributes=attributes)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("refusal", CONVERSIONS)
def test_a_wrong_argument_is_refused_and_changes_nothing(refusal: Refusal) -> None:
    assert_refused(refusal)
