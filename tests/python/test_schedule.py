# SPDX-License-Identifier: Apache-2.0
"""Changing the scope of a layer during training, manually or with a schedule."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from rank_pool import RankPool, connected_group
from torch import distributed, nn
from torch._dynamo.testing import CompileCounterWithBackend

import normscope
from normscope import BatchNorm1d, ProgressiveScope, set_scope

Scopes = list[str]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Sequential(nn.Linear(3, 3), BatchNorm1d(3)), nn.BatchNorm1d(3), BatchNorm1d(3)
    )


def scopes_of(model: nn.Module) -> Scopes:
    return [str(m.scope) for m in model.modules() if isinstance(m, normscope.BatchNorm)]


def test_set_scope_changes_only_the_selected_layers() -> None:
    model = network()

    set_scope(model, "local")
    set_scope(model, normscope.Scope.slices(2), include="0.*")
    assert scopes_of(model) == ["slices:2", "local"]
    set_scope(model, "group:2", exclude=["0.*"])

    assert scopes_of(model) == ["slices:2", "group:2"]
    assert type(model[1]) is nn.BatchNorm1d


def test_set_scope_keeps_everything_else() -> None:
    model = normscope.convert(nn.Sequential(nn.BatchNorm1d(3)))
    layer = model[0]
    assert isinstance(layer, normscope.BatchNorm)
    layer.slice_stats = "first"
    layer.group_name = "7"
    of_scope = {"_scope", "_earlier_scopes"}
    before = {key: value for key, value in layer.__dict__.items() if key not in of_scope}

    set_scope(model, "slices:2")

    assert {key: value for key, value in layer.__dict__.items() if key not in of_scope} == before
    assert layer.layer_name == "0"


def test_an_assigned_text_becomes_a_scope() -> None:
    layer = BatchNorm1d(3, scope="local")

    layer.scope = "slices:2"
    assert layer.scope == normscope.Scope.slices(2)


MANY = [f"slices:{count}" for count in range(1, 10)]


@pytest.mark.parametrize("compiles", ["function", "method", "after the schedule"])
def test_a_compiled_model_warns_of_more_scopes_than_torch_compiles_it_for(compiles: str) -> None:
    model: Any = network()
    text = "scopes: expected at most 8 for a compiled model, .* got 9; torch._dynamo.config"
    if compiles == "function":
        model = torch.compile(model, backend="eager")
    if compiles == "method":
        model.compile(backend="eager")
    if compiles == "after the schedule":
        schedule = ProgressiveScope(model, MANY, range(9))
        compiled: Any = torch.compile(model, backend="eager")
        compiled(torch.randn(4, 3))
        with pytest.warns(UserWarning, match=text):
            schedule.step()
    else:
        with pytest.warns(UserWarning, match=text):
            schedule = ProgressiveScope(model, MANY, range(9))
        ProgressiveScope(model, MANY[:8], range(8))

    schedule.step()


def test_a_model_that_is_not_compiled_may_have_any_number_of_scopes() -> None:
    model = network()
    schedule = ProgressiveScope(model, MANY, range(9))

    for _ in MANY:
        model(torch.randn(18, 3))
        schedule.step()

    assert str(schedule.scope) == "slices:9"


def test_a_schedule_follows_its_milestones() -> None:
    model = network()
    schedule = ProgressiveScope(model, ["local", "group:2", "world"], [0, 2, 3])
    seen = []
    for _ in range(5):
        assert scopes_of(model) == [str(schedule.scope)] * 2
        seen.append(str(schedule.scope))
        schedule.step()

    assert seen == ["local", "local", "group:2", "world", "world"]


def test_layers_can_have_different_schedules() -> None:
    model = network()
    early = ProgressiveScope(model, ["local", "world"], [0, 1], include="0.*")
    late = ProgressiveScope(model, ["slices:2", "local"], [0, 2], exclude="0.*")

    seen = []
    for _ in range(3):
        seen.append(scopes_of(model))
        early.step()
        late.step()

    assert seen == [["local", "slices:2"], ["world", "slices:2"], ["world", "local"]]


def test_layers_can_be_chosen_by_an_iterator() -> None:
    model = network()
    set_scope(model, "slices:2")
    schedule = ProgressiveScope(model, ["local", "world"], [0, 2], include=iter(["0.*"]))

    for _ in range(3):
        schedule.step()

    assert scopes_of(model) == ["world", "slices:2"]


def test_loading_a_state_sets_the_scope_of_the_layers() -> None:
    def made() -> tuple[nn.Module, ProgressiveScope]:
        model = network()
        return model, ProgressiveScope(model, ["local", "group:2", "world"], [0, 2, 4])

    _, schedule = made()
    for _ in range(3):
        schedule.step()
    file = io.BytesIO()
    torch.save(schedule.state_dict(), file)
    file.seek(0)

    model, resumed = made()
    resumed.load_state_dict(torch.load(file, weights_only=True))

    assert scopes_of(model) == ["group:2"] * 2
    resumed.step()
    assert scopes_of(model) == ["world"] * 2


def doubling_scopes(total_steps: int) -> tuple[Scopes, Scopes]:
    """Run over the default group, and over a group of two ranks if there are enough."""

    def run(group: distributed.ProcessGroup | None) -> Scopes:
        model = network()
        schedule = ProgressiveScope.doubling(model, total_steps, process_group=group)
        seen = []
        for _ in range(total_steps + 1):
            seen.append(scopes_of(model)[0])
            schedule.step()
        return seen

    pair = connected_group([0, 1]) if distributed.get_world_size() > 1 else None
    return run(None), run(pair) if distributed.get_rank() < 2 else []


DOUBLING = {
    1: ["local"] * 7,
    2: ["local"] * 3 + ["world"] * 4,
    3: ["local"] * 2 + ["group:2"] * 2 + ["world"] * 3,
    4: ["local"] * 2 + ["group:2"] * 2 + ["world"] * 3,
    6: ["local"] + ["group:2"] * 2 + ["group:4"] + ["world"] * 3,
}


@pytest.mark.parametrize("size", DOUBLING)
def test_doubling_goes_from_one_rank_to_the_world(ranks: RankPool, size: int) -> None:
    expected = [DOUBLING[size], DOUBLING[min(size, 2)]]

    for rank, seen in enumerate(ranks.run(size, doubling_scopes, 6)):
        assert list(seen) == (expected if rank < 2 else [expected[0], []])


def test_without_a_process_group_doubling_stays_local() -> None:
    model = network()

    schedule = ProgressiveScope.doubling(model, 10)

    assert (str(schedule.scope), scopes_of(model)) == ("local", ["local"] * 2)


def test_a_compiled_model_never_keeps_the_old_scope() -> None:
    layer = normscope.BatchNorm2d(3, scope="local")
    eager = copy.deepcopy(layer)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    assert isinstance(compiled, nn.Module)
    torch.manual_seed(0)
    seen = []
    for scope in ("local", "slices:2", "local", "slices:4"):
        set_scope(compiled, scope)
        set_scope(eager, scope)
        for _ in range(2):
            x = torch.randn(4, 3, 5, 5)
            assert torch.equal(compiled(x), eager(x))
        seen.append(graphs.frame_count)

    # One graph per scope, and no new graph for a step.
    assert seen == [1, 2, 2, 3]
