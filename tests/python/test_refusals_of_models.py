# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of functions of whole models: errors say what was expected and given.

A refused call changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch
from noisy_network import noise_batches, small_network
from refusals import Refusal, assert_refused
from replicas import replicas_of, run_replicas
from torch import distributed, nn

import normscope
from normscope.scopes import ScopePlan

pytestmark = pytest.mark.portable

X = torch.randn(4, 3)


class Detached(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class Disconnected(nn.Module):
    """Raises what an exchange raises if a rank is gone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise distributed.DistError("rank 1 is gone")


def two_layers() -> nn.Module:
    first = nn.Sequential(nn.Linear(3, 3), normscope.BatchNorm1d(3))
    return nn.Sequential(first, nn.BatchNorm1d(3), normscope.BatchNorm1d(3))


class InReplicas(nn.Module):
    """Runs two replicas of a module, as torch.nn.DataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> None:
        raise run_replicas(replicas_of(self.module, 2), x.chunk(2))[0]


def on_two_devices() -> nn.Module:
    parallel = nn.DataParallel(normscope.BatchNorm1d(3, scope="local"))
    parallel.device_ids = [0, 1]
    return parallel


def evaluated() -> nn.Module:
    return nn.Sequential(normscope.BatchNorm1d(3)).eval()


# Recommendations.


def recommends(
    batches: Iterable[object], *arguments: float, **keywords: Any
) -> Callable[[nn.Module], object]:
    return lambda model: normscope.recommend_scopes(model, batches, *arguments, **keywords)


def pairs() -> list[object]:
    return [[x, torch.zeros(len(x))] for x in noise_batches(8)]


@cache
def plan() -> ScopePlan:
    return normscope.recommend_scopes(small_network(), noise_batches(16), ranks=4)


def of_other_channels() -> nn.Module:
    model = small_network()
    model[7] = normscope.BatchNorm1d(8)
    return model


RECOMMENDATIONS: list[Refusal] = [
    *(
        (small_network, call, ValueError, message)
        for call, message in [
            (recommends([]), "batches: expected at least one"),
            (recommends(noise_batches(2), -0.1), "noise: expected at least 0, got -0.1"),
            (recommends(noise_batches(2), math.nan), "noise: expected at least 0, got nan"),
            (recommends(noise_batches(2), ranks=0), "at least 1, got 0"),
            (
                recommends(noise_batches(2), ranks=3),
                "expected at least 3 samples, one for each rank, got 2 in 1",
            ),
            (recommends(noise_batches(1)), "more than 1 value per channel"),
            (
                recommends([x / 0 for x in noise_batches(8)]),
                "expected finite inputs and gradients of every layer, got NaN or infinity in 1",
            ),
            (recommends(pairs()), r"pass the inputs alone: \(x for x, _ in loader\)"),
        ]
    ),
    (
        lambda: nn.Sequential(Disconnected(), small_network()),
        recommends(pairs()),
        distributed.DistError,
        "^rank 1 is gone$",
    ),
    *(
        (make, recommends(noise_batches(2)), ValueError, message)
        for make, message in [
            (nn.ReLU, "expected layers of normscope"),
            (evaluated, "expected layers of normscope in training, .* include"),
            (
                lambda: nn.DataParallel(small_network()),
                "model: expected the model in the DataParallel, got the wrapper; pass model.module",
            ),
            (
                lambda: nn.Sequential(small_network(), Detached()),
                "model: expected outputs with a gradient, whose noise can be measured, got none",
            ),
            (
                lambda: nn.Sequential(nn.LazyConv2d(3, 1), normscope.BatchNorm2d(3)),
                r"expected one that knows its shapes, got 0\.weight",
            ),
        ]
    ),
    *(
        (make, lambda model: plan().apply(model), ValueError, message)
        for make, message in [
            (lambda: nn.Linear(2, 2), "expected layers of normscope called 1, 7, got none$"),
            (
                lambda: nn.ModuleDict({"module": small_network()}),
                r"called 1, 7, got none; pass model\.module",
            ),
            (
                lambda: torch.compile(small_network(), backend="eager"),
                r"called 1, 7, got none; pass model\._orig_mod",
            ),
            (of_other_channels, "expected 16 channels in 7, .* plan was made, got 8"),
        ]
    ),
]


# Scopes and schedules.


def sets(scope: str, **patterns: Any) -> Callable[[nn.Module], object]:
    return lambda model: normscope.set_scope(model, scope, **patterns)


def schedules(
    scopes: list[str], milestones: list[int], **patterns: Any
) -> Callable[[nn.Module], Any]:
    return lambda model: normscope.ProgressiveScope(model, scopes, milestones, **patterns)


DOUBLING: Any = normscope.ProgressiveScope.doubling
RANKS: Any = normscope.Scope.ranks

SCOPES: list[Refusal] = [
    *(
        (two_layers, call, ValueError, message)
        for call, message in [
            (
                sets("local", include=["0.*", "head.*"]),
                r"include: .* match a layer's name \('0\.1', '2'\), got 'head\.\*'",
            ),
            (sets("local", exclude="neck"), "exclude: .* got 'neck'"),
            (sets("galaxy"), "scope"),
            (lambda model: setattr(model[2], "scope", "galaxy"), "scope"),
            (
                schedules(["local", "world"], [0]),
                r"one for each scope, and at least one, got \[0\] for \['local', 'world'\]",
            ),
            (schedules([], []), r"and at least one, got \[\] for \[\]"),
            (
                schedules(["local", "world"], [1, 2]),
                r"milestones: expected 0 and then increasing steps, got \[1, 2\]",
            ),
            (
                schedules(["local", "group:2", "world"], [0, 5, 5]),
                r"milestones: expected 0 and then increasing steps, got \[0, 5, 5\]",
            ),
            (schedules(["galaxy"], [0]), "scope"),
            (schedules(["local"], [0], include="neck"), "got 'neck'"),
            (
                lambda model: normscope.ProgressiveScope.doubling(model, total_steps=0),
                "total_steps: expected at least 1, one for each of local, got 0",
            ),
            (
                lambda model: schedules(["world"], [0])(model).load_state_dict({"step": 3}),
                r"state_dict: expected last_step, an int of at least 0, got \{'step': 3\}",
            ),
            (
                lambda model: schedules(["world"], [0])(model).load_state_dict(None),
                "state_dict: expected last_step, an int of at least 0, got None",
            ),
            (
                lambda model: DOUBLING(model, 9, process_group="dp"),
                "process_group: expected a process group or mesh that this rank is in, got 'dp'",
            ),
        ]
    ),
    *(
        (two_layers, call, TypeError, message)
        for call, message in [
            (
                sets("local", include=[nn.BatchNorm1d]),
                r"include: expected patterns of names, got \[<class .*BatchNorm1d",
            ),
            (schedules(["local"], [0], exclude=3), r"exclude: expected .* names, got \[3\]"),
            (
                lambda model: sets(str(RANKS([0, 1])))(model),
                r"sets: expected sets of ranks, such as \[\[0, 1\], .* got \[0, 1\]",
            ),
        ]
    ),
    (
        nn.Sequential,
        sets("local"),
        ValueError,
        "model: expected layers of normscope .* got Sequential, which has none",
    ),
]


# Running statistics.


def named_layer() -> nn.Module:
    return normscope.convert(nn.Sequential(nn.BatchNorm1d(3)))[0]


def accumulates(*batches: torch.Tensor) -> Callable[[nn.Module], None]:
    def call(model: nn.Module) -> None:
        with normscope.accumulate(model):
            for batch in batches:
                model(batch)

    return call


def estimates(batches: list[Any], include: str | None = None) -> Callable[[nn.Module], object]:
    return lambda model: normscope.estimate_running_stats(model, batches, include=include)


def accumulates_with_two_momenta(layer: normscope.BatchNorm) -> None:
    momentum = layer.momentum
    with normscope.accumulate(layer):
        layer(X)
        try:
            layer.momentum = 0.5
            layer(X)
        finally:
            layer.momentum = momentum


def accumulates_in_other_buffers(layer: nn.Module) -> None:
    others = {name: value.clone() for name, value in layer.named_buffers()}
    with normscope.accumulate(layer):
        torch.func.functional_call(layer, others, X)


OF_OTHERS: Any = distributed.GroupMember.NON_GROUP_MEMBER

RUNNING_STATISTICS: list[Refusal] = [
    *(
        (small_network, call, ValueError, "expected a process group or mesh that this rank")
        for call in (
            recommends([], process_group=OF_OTHERS),
            partial(normscope.estimate_running_stats, batches=[], process_group=OF_OTHERS),
            partial(normscope.sync_running_stats, process_group=OF_OTHERS),
        )
    ),
    (
        lambda: InReplicas(normscope.BatchNorm1d(3)),
        estimates([X]),
        RuntimeError,
        "model: expected the module of a torch.nn.DataParallel, got the wrapper",
    ),
    (named_layer, accumulates(X, X[:, :2]), RuntimeError, "x: expected 3 channels"),
    *(
        (make, call, ValueError, message)
        for make, call, message in [
            (
                named_layer,
                accumulates_with_two_momenta,
                r"0: expected momentum 0\.1 in all calls .* got 0\.5",
            ),
            (named_layer, accumulates_in_other_buffers, "0: expected the buffers .* got others"),
            (
                lambda: nn.Sequential(
                    nn.BatchNorm1d(3), normscope.BatchNorm1d(3, track_running_stats=False)
                ),
                accumulates(),
                "model: expected layers of normscope with running",
            ),
            (
                lambda: normscope.convert(nn.Sequential(nn.LazyBatchNorm1d())),
                accumulates(),
                "0: expected a layer that has seen an input",
            ),
            (
                on_two_devices,
                estimates([X]),
                "expected the model in the DataParallel, got the wrapper; pass model.module",
            ),
            (evaluated, estimates([X]), "expected layers with running statistics in training"),
            (
                evaluated,
                estimates([X], include="norm"),
                "include: expected patterns that match .* got 'norm'",
            ),
            (
                small_network,
                estimates(pairs()),
                r"pass the inputs alone: \(x for x, _ in loader\)",
            ),
        ]
    ),
]


# No model.


def in_a_list(call: Callable[[Any], object]) -> Callable[[nn.Module], object]:
    return lambda model: call([model])


NO_MODEL: list[Refusal] = [
    (two_layers, in_a_list(call), TypeError, "model: expected a torch.nn.Module, got a list")
    for call in (
        normscope.convert,
        normscope.revert,
        normscope.to_torch,
        sets("local"),
        schedules(["local"], [0]),
        accumulates(),
        estimates([X]),
        recommends([X]),
        lambda model: plan().apply(model),
    )
]


@pytest.mark.parametrize(
    "refusal",
    [
        *NO_MODEL,
        *RECOMMENDATIONS,
        *SCOPES,
        *(pytest.param(row, marks=pytest.mark.on_device) for row in RUNNING_STATISTICS),
    ],
)
def test_a_wrong_argument_is_refused_and_changes_nothing(refusal: Refusal) -> None:
    assert_refused(refusal)
