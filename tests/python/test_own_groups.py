# SPDX-License-Identifier: Apache-2.0
"""normscope's messages never mix with those of the program's process groups."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from rank_pool import RankPool, connected_group, error_of
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import normscope
from normscope._binding import ops

OVER_GLOO = {"NORMSCOPE_SHARED_MEMORY": "0"}


def batch() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4)


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


def freed_when_a_group_is_closed() -> list[str]:
    """Close a group that raises; return what its error held and is freed."""
    freed = []

    class Held:
        def __del__(self) -> None:
            time.sleep(0.3)
            freed.append("held")

    def destroy(_: object) -> None:
        held = Held()  # in the error's traceback
        raise RuntimeError(f"{type(held).__name__}: not destroyed")

    normscope.BatchNorm2d(3)(batch())
    with patch.object(distributed, "destroy_process_group", destroy):
        ops.forget_groups()
    return freed.copy()


def test_what_an_error_holds_is_freed_before_the_program_goes_on(ranks: RankPool) -> None:
    answers = ranks.run(2, freed_when_a_group_is_closed, environment=OVER_GLOO)

    assert answers == [["held"]] * 2


def over_a_backend_that_makes_one_group() -> str:
    made: list[Any] = []

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        if made:
            raise RuntimeError("one is enough")
        made.append(distributed.ProcessGroupGloo(store, rank, size, timeout=timeout))
        return made[0]

    distributed.Backend.register_backend("once", create, devices=["cpu"])
    group = distributed.new_group(list(range(distributed.get_world_size())), backend="once")
    layer = normscope.BatchNorm2d(3, process_group=group)
    error = error_of(lambda: layer(batch()), RuntimeError)
    del distributed.Backend._plugins["ONCE"]
    return error


def test_a_backend_that_cannot_make_a_second_group_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(2, over_a_backend_that_makes_one_group, environment=OVER_GLOO):
        assert "torch.distributed made no group for normscope's messages alone" in error
        assert "RuntimeError: one is enough" in error


def over_fake_ranks() -> list[str]:
    distributed.destroy_process_group()
    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    layer = normscope.BatchNorm2d(3)
    calls: list[Callable[[], object]] = [
        lambda: layer(batch()),
        lambda: normscope.sync_running_stats(layer),
        lambda: next(iter(normscope.joined([batch()]))),
    ]
    return [error_of(call, RuntimeError) for call in calls]


def test_a_backend_without_options_is_refused(ranks: RankPool) -> None:
    [errors] = ranks.run(1, over_fake_ranks)

    expected = "process_group: expected a backend whose options tell its time limit, got fake"
    assert [expected in error for error in errors] == [True] * 3
