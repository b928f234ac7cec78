# SPDX-License-Identifier: Apache-2.0
"""normscope's messages never mix with those of the program's process groups."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from rank_pool import RankPool, connected_group
from torch import distributed

import normscope

OVER_GLOO = {"NORMSCOPE_SHARED_MEMORY": "0"}
SECONDS = 2.0
LIMITED = {**OVER_GLOO, "NORMSCOPE_TIMEOUT": str(SECONDS)}
PATIENCE_SECONDS = 30.0


def batch() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4)


def raised_by(call: Callable[[], Any]) -> tuple[str, float]:
    """Return what a call raises, and the seconds until then."""
    begin = time.monotonic()
    with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError)) as caught:
        call()
    return str(caught.value), time.monotonic() - begin


def sum_of_all() -> float:
    """Return the sum of the program's own message, which is the number of ranks if undisturbed."""
    sums = torch.ones(64, 64, dtype=torch.float64)
    distributed.all_reduce(sums)
    assert bool((sums == sums[0, 0]).all())
    return float(sums[0, 0])


def one_step_more_on_rank_2() -> tuple[float, str]:
    layer = normscope.BatchNorm2d(3)
    layer(batch())
    error = ""
    if distributed.get_rank() == 2:
        error, _ = raised_by(lambda: layer(batch()))
    return sum_of_all(), error


def test_a_message_that_no_peer_expects_meets_none_of_the_program_s(ranks: RankPool) -> None:
    answers = ranks.run(
        3, one_step_more_on_rank_2, environment=LIMITED, hang_seconds=PATIENCE_SECONDS
    )

    assert [total for total, _ in answers] == [3.0, 3.0, 3.0]
    assert "ranks 0, 1 are not there" in answers[2][1]


def messages_under_way() -> list[float]:
    """Begin messages of the program before a layer and end them after it, in different orders."""
    layer = normscope.BatchNorm2d(3)
    first, second = torch.ones(100), torch.ones(100)
    if distributed.get_rank() == 0:
        works = [distributed.all_reduce(first, async_op=True)]
        layer(batch())
        works.append(distributed.all_reduce(second, async_op=True))
    else:
        works = [distributed.all_reduce(t, async_op=True) for t in (first, second)]
        layer(batch())
    for work in works:
        assert work is not None
        work.wait()
    return [float(first[0]), float(second[0])]


def test_messages_of_the_program_may_be_under_way(ranks: RankPool) -> None:
    assert ranks.run(2, messages_under_way, environment=OVER_GLOO) == [[2.0, 2.0]] * 2


def bad_input_on_rank_0() -> tuple[str, float, float]:
    layer = normscope.BatchNorm2d(3)
    layer(batch())
    distributed.barrier()
    x = torch.randn(2, 5 if distributed.get_rank() == 0 else 3, 4, 4)
    return (*raised_by(lambda: layer(x)), sum_of_all())


def test_peers_of_a_rank_that_raises_are_told_at_once_and_the_group_lives(ranks: RankPool) -> None:
    answers = ranks.run(3, bad_input_on_rank_0, environment=OVER_GLOO)

    assert "expected 3" in answers[0][0]
    for error, seconds, _ in answers[1:]:
        assert "rank 0 failed: " in error
        assert "expected 3" in error
        assert seconds < SECONDS
    assert [total for _, _, total in answers] == [3.0] * 3


BAD_CALLS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "sparse input": lambda layer: layer(batch().to_sparse()),
    "no input": lambda layer: layer(None),
    "a list": lambda layer: layer([1.0]),
    "a damaged scope": lambda layer: with_scope(layer, "wrld"),
    "momentum": lambda layer: with_momentum(layer, "much"),
    "without weight": lambda layer: without_weight(layer),
    "nested input": lambda layer: layer(nested()),
    "mapped parameters": lambda layer: mapped(layer, buffers=False),
    "mapped parameters and buffers": lambda layer: mapped(layer, buffers=True),
    "a residual that is a list": lambda layer: layer(batch(), [1.0]),
    "a residual of another shape": lambda layer: layer(batch(), torch.ones(7)),
    "sparse gradient": lambda layer: backward_of(layer, batch().to_sparse()),
}


def with_momentum(layer: torch.nn.Module, momentum: object) -> torch.Tensor:
    layer.momentum = momentum  # type: ignore[assignment]
    y: torch.Tensor = layer(batch())
    return y


def with_scope(layer: torch.nn.Module, text: str) -> torch.Tensor:
    object.__setattr__(layer.scope, "text", text)
    y: torch.Tensor = layer(batch())
    return y


def backward_of(layer: torch.nn.Module, dy: torch.Tensor) -> None:
    torch.autograd.backward(layer(batch().requires_grad_()), dy)


def without_weight(layer: torch.nn.Module) -> torch.Tensor:
    del layer.weight
    y: torch.Tensor = layer(batch())
    return y


def mapped(layer: torch.nn.Module, *, buffers: bool) -> Any:  # noqa: ANN401
    """Call an ensemble, as torch's recipe does."""
    parameters, stacked = torch.func.stack_module_state([layer, copy.deepcopy(layer)])
    state = (parameters, stacked) if buffers else (parameters,)

    def call(state: Any, x: torch.Tensor) -> Any:  # noqa: ANN401
        return torch.func.functional_call(layer, state, (x,))

    return torch.func.vmap(call, in_dims=(0, None))(state, batch())


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([batch()[0], batch()[0]], layout=torch.jagged)


def rank_0_calls_badly(what: str, met: str, scope: str) -> tuple[str, float]:
    layer = normscope.BatchNormAct2d(3, scope=scope)
    if met == "met":
        layer(batch())
        distributed.barrier()
    if distributed.get_rank() == 0:
        return raised_by(lambda: BAD_CALLS[what](layer))
    return raised_by(lambda: backward_of(layer, batch()))


def rank_0_calls_a_local_layer_badly() -> str:
    local, layer = normscope.BatchNorm2d(3, scope="local"), normscope.BatchNorm2d(3)
    layer(batch())
    if distributed.get_rank() == 0:
        raised_by(lambda: local(None))
    layer(batch())
    return "fine"


def test_a_local_call_that_fails_does_not_affect_other_ranks(ranks: RankPool) -> None:
    assert ranks.run(2, rank_0_calls_a_local_layer_badly, environment=OVER_GLOO) == ["fine"] * 2


@pytest.mark.parametrize("what", BAD_CALLS)
@pytest.mark.parametrize(("met", "transport"), [("first meeting", "1"), ("met", "0"), ("met", "1")])
@pytest.mark.parametrize("scope", ["world", "norm_batch:4"])
def test_a_call_that_reaches_no_backend_is_told_to_peers(
    ranks: RankPool, met: str, transport: str, what: str, scope: str
) -> None:
    environment = {"NORMSCOPE_SHARED_MEMORY": transport}

    answers = ranks.run(2, rank_0_calls_badly, what, met, scope, environment=environment)

    error, seconds = answers[1]
    assert "rank 0" in error
    assert "failed: " in error
    assert seconds < 2 * SECONDS


def rank_1_is_late(scope: str) -> tuple[str, float]:
    net = torch.nn.Sequential(torch.nn.BatchNorm2d(3))
    net = normscope.convert(net, scope)
    net(batch())
    distributed.barrier()
    if distributed.get_rank() == 1:
        time.sleep(2 * SECONDS + 2.0)
    if scope == "group:2" and distributed.get_rank() > 1:
        net(batch())  # not affected
        return "", 0.0
    return raised_by(lambda: net(batch()))


@pytest.mark.own_kernels
@pytest.mark.parametrize("scope", ["world", "group:2"])
def test_a_late_rank_is_named_by_its_peers_and_raises_when_it_arrives(
    ranks: RankPool, scope: str
) -> None:
    answers = ranks.run(4, rank_1_is_late, scope, environment=LIMITED)

    error, seconds = answers[0]
    assert "rank 1 is not there" in error
    assert f"forward of 0 (3 channels, scope {scope})" in error
    assert SECONDS <= seconds < SECONDS + 4.0
    error, seconds = answers[1]
    assert "rank 1 is not there" in error
    assert seconds < SECONDS


def rank_1_comes_late_to_the_first_meeting() -> tuple[str, float]:
    if distributed.get_rank() == 1:
        time.sleep(2 * SECONDS)
    net = normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm2d(3)), "world")
    return raised_by(lambda: net(batch()))


def test_the_first_meeting_names_layer_scope_and_who_is_missing(ranks: RankPool) -> None:
    answers = ranks.run(3, rank_1_comes_late_to_the_first_meeting, environment=LIMITED)

    for error, _ in answers:
        assert "rendezvous" in error
        assert "0 (scope world)" in error
        assert "rank 1 did not come within 2 s" in error
    assert answers[1][1] < SECONDS


def growth_with_groups_of_the_same_ranks(groups: int) -> int:
    """Return by how much the number of open files grows between the first group and the last."""
    open_files = []
    for _ in range(groups):
        group = connected_group(range(distributed.get_world_size()))
        layer = normscope.BatchNorm2d(3, process_group=group)
        layer(batch()).sum().backward()
        distributed.barrier()
        distributed.destroy_process_group(group)
        del group
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    return open_files[-1] - open_files[0]


def test_consecutive_groups_are_kept_apart_and_leave_nothing_open(ranks: RankPool) -> None:
    groups = 6

    growth = ranks.run(2, growth_with_groups_of_the_same_ranks, groups, environment=OVER_GLOO)

    assert max(growth) < groups - 1


def over_a_backend_that_makes_one_group() -> str:
    made: list[Any] = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401
        if made:
            raise RuntimeError("one is enough")
        made.append(distributed.ProcessGroupGloo(store, rank, size, timeout=timeout))
        return made[0]

    distributed.Backend.register_backend("once", create, devices=["cpu"])
    group = distributed.new_group(list(range(distributed.get_world_size())), backend="once")
    layer = normscope.BatchNorm2d(3, process_group=group)
    error, _ = raised_by(lambda: layer(batch()))
    del distributed.Backend._plugins["ONCE"]
    return error


def test_a_backend_that_cannot_make_a_second_group_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(2, over_a_backend_that_makes_one_group, environment=LIMITED):
        assert "torch.distributed made no group for normscope's messages alone" in error
        assert "RuntimeError: one is enough" in error
