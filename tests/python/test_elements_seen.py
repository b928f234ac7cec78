# SPDX-License-Identifier: Apache-2.0
"""elements_seen: the elements in running statistics, by which pooling weighs the ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from rank_pool import RankPool, connected_group
from torch import distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, update_bn

import normscope

pytestmark = pytest.mark.on_device


def weights_after(kind: str) -> float:
    """Return the pooled mean of ranks with values 0 and 3, and 1 and 2 elements, or as ``kind``."""
    rank = distributed.get_rank()
    layer = normscope.BatchNorm1d(1, scope="local", momentum=1.0)
    x = torch.full((2 * (rank + 1), 1), 3.0 * rank)
    layer(x)
    if kind == "copied":
        layer = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    elif kind == "unknown on one rank" and rank == 0:
        layer.elements_seen = None
    elif kind == "pooled before":
        normscope.sync_running_stats(layer)
        assert layer.elements_seen == 0
        layer(torch.full((2 * (2 - rank), 1), 3.0 * rank))
    elif kind == "reverted":
        plain = normscope.revert(normscope.convert(nn.BatchNorm1d(1)))
        plain.load_state_dict(layer.state_dict())
        normscope.sync_running_stats(plain)
        return plain.get_buffer("running_mean").item()
    elif kind == "without elements":
        layer.elements_seen = 0
    elif kind == "compiled":
        torch.compile(layer, backend="eager")(x)
    elif kind == "compiled, then reset":
        torch.compile(layer, backend="eager")(x[:2])
        layer.reset_running_stats()
        layer(x)
    elif kind == "in a group":
        normscope.sync_running_stats(layer, connected_group([0, 1]))
    elif kind == "of two layers":
        other = copy.deepcopy(layer)
        for name, buffer in layer.named_buffers():
            setattr(other, name, buffer)
        other(torch.full((2 * (2 - rank), 1), 3.0 * rank))
        normscope.sync_running_stats(nn.Sequential(layer, other))
    normscope.sync_running_stats(layer)
    return layer.get_buffer("running_mean").item()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("counted", 2.0),
        ("copied", 2.0),
        ("in a group", 2.0),
        ("pooled before", 1.0),
        ("unknown on one rank", 1.5),
        ("compiled", 1.5),
        ("compiled, then reset", 2.0),
        ("without elements", 1.5),
        ("of two layers", 1.5),
        ("reverted", 1.5),
    ],
)
def test_ranks_are_weighted_by_elements_since_the_last_pooling(
    ranks: RankPool, kind: str, expected: float
) -> None:
    assert ranks.run(2, weights_after, kind) == [expected] * 2


# The drawn programs of test_programs.py compare them for other scopes.
@pytest.mark.parametrize(("scope", "samples"), [("norm_batch:2", 3), ("slices:9", 1)])
def test_elements_are_those_of_the_first_slice(scope: str, samples: int) -> None:
    layer = normscope.BatchNorm1d(3, scope=scope, slice_stats="first")

    layer(torch.randn(5, 3, 4))

    assert layer.elements_seen == samples * 3 * 4


FRESH = nn.BatchNorm1d(1)
MEAN, VAR, _ = FRESH.buffers()


def cumulative(layer: Any) -> None:
    layer.momentum = None
    layer.num_batches_tracked *= 0


def replaced_and_cumulative(layer: Any) -> None:
    """Do what stochastic weight averaging of Lightning does."""
    layer.running_mean, layer.running_var = MEAN.clone(), VAR.clone()
    cumulative(layer)


# What sets the statistics of a layer, as programs and libraries do.
Change = Callable[[Any], object]
REPLACING: list[Change] = [
    lambda layer: layer.reset_running_stats(),
    lambda layer: layer.load_state_dict(FRESH.state_dict()),
    lambda layer: layer.load_state_dict(copy.deepcopy(FRESH).state_dict(), assign=True),
    *(
        lambda layer, name=name, value=value: layer.load_state_dict({name: value}, strict=False)
        for name, value in FRESH.named_buffers()
    ),
    replaced_and_cumulative,
    lambda layer: setattr(layer, "running_var", VAR.clone()),  # fvcore.nn.precise_bn
    lambda layer: layer.double(),
]
# A graph writes into the buffers as these do.
IN_PLACE: list[Change] = [
    lambda layer: layer.running_var.copy_(VAR),
    torch.inference_mode()(lambda layer: layer.running_mean.copy_(MEAN)),
    lambda layer: torch._foreach_lerp_([layer.running_mean, layer.running_var], [MEAN, VAR], 0.5),
    cumulative,
]
# torch's versions of tensors do not tell these.
HIDDEN: list[Change] = [
    lambda layer: layer.running_mean.data.copy_(MEAN),
    lambda layer: setattr(layer.running_mean, "data", MEAN.clone()),
    lambda layer: layer.running_mean.numpy().fill(0),
]


def compiled_and_run(layer: nn.Module) -> None:
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        compiled(torch.randn(4, 1))


@pytest.mark.parametrize(
    ("change", "compiles"), [*product(REPLACING, (False, True)), *product(IN_PLACE, (False,))]
)
def test_the_count_starts_anew_if_others_set_the_statistics(
    change: Change, *, compiles: bool
) -> None:
    layer: Any = normscope.BatchNorm1d(1, scope="local")
    layer(torch.randn(5, 1))
    if compiles:
        compiled_and_run(layer)
    assert layer.elements_seen == (None if compiles else 5)

    change(layer)
    assert layer.elements_seen == 0
    for calls in (1, 2):
        layer(torch.randn(3, 1).type_as(layer.running_mean))
        assert layer.elements_seen == 3 * calls


@pytest.mark.parametrize("compiles", [False, True])
def test_update_bn_counts_anew(*, compiles: bool) -> None:
    model: Any = nn.Sequential(normscope.BatchNorm1d(1, scope="local"))
    model(torch.randn(5, 1))
    if compiles:
        compiled_and_run(model)
    updated: Any = AveragedModel(model)

    update_bn([torch.zeros(2, 1)], updated)
    updated(torch.randn(3, 1))

    assert updated.module[0].elements_seen == 2 + 3


@pytest.mark.parametrize("change", IN_PLACE)
def test_writes_count_again_once_a_layer_has_run_without_a_graph(change: Change) -> None:
    layer: Any = normscope.BatchNorm1d(1, scope="local")
    compiled_and_run(layer)

    for expected in (None, 3):
        change(layer)
        layer(torch.randn(3, 1))
        assert layer.elements_seen == expected


def test_an_export_keeps_the_count() -> None:
    model: Any = nn.Sequential(normscope.BatchNorm1d(1, scope="local"))
    model(torch.randn(5, 1))

    torch.export.export(model, (torch.randn(4, 1),))

    assert model[0].elements_seen == 5


@pytest.mark.parametrize("change", HIDDEN)
def test_the_count_is_unknown_after_a_hidden_write(change: Change) -> None:
    layer: Any = normscope.BatchNorm1d(1, scope="local")
    layer(torch.randn(5, 1))

    change(layer)
    for _ in range(2):
        assert layer.elements_seen is None
        layer(torch.randn(3, 1))
    layer.reset_running_stats()
    layer(torch.randn(3, 1))
    assert layer.elements_seen == 3


@pytest.mark.own_kernels
def test_calls_that_update_nothing_do_not_count() -> None:
    layer = normscope.BatchNorm1d(3, scope="local")
    x = torch.randn(4, 3)
    layer(x)
    layer.momentum = 0
    layer(x)
    layer.momentum = 0.1
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(torch.randn(4, 3))
    layer.track_running_stats = False
    layer(x)
    layer.track_running_stats = True
    assert layer.elements_seen == 12
    layer(x)
    assert layer.elements_seen == 24

    abstract = normscope.BatchNorm1d(3, scope="local", device="meta")
    abstract(x.to("meta"))
    assert abstract.elements_seen == 0
    with torch.inference_mode():
        layer = normscope.BatchNorm1d(3, scope="local", affine=False)
    layer(x)
    assert layer.num_batches_tracked == 1
    assert layer.elements_seen == 0  # torch has no versions of such buffers


def test_what_only_reads_the_statistics_keeps_the_count() -> None:
    model: Any = nn.Sequential(normscope.BatchNorm1d(3, scope="local"))
    model(torch.randn(4, 3))

    model.eval()(torch.randn(4, 3))
    state = copy.deepcopy(model.state_dict())
    model.to("cpu", torch.float32).train().share_memory()
    others = [
        copy.deepcopy(model),
        nn.Sequential(copy.copy(model[0])),
        pickle.loads(pickle.dumps(model)),
    ]
    averaged: Any = AveragedModel(model).module

    for other in (model, *others, averaged):
        assert other[0].elements_seen == 12
        assert list(other.state_dict()) == list(state)
    assert "elements_seen" not in vars(others[-1][0])


def test_a_compiled_graph_leaves_the_count_unknown_and_is_compiled_once() -> None:
    layer = normscope.BatchNorm1d(3, scope="local")
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for _ in range(3):
        compiled(torch.randn(4, 3))
        assert layer.elements_seen is None
        layer.elements_seen = 0  # as pooling does

    assert graphs.frame_count == 1
