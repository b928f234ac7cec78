# SPDX-License-Identifier: Apache-2.0
"""The library's resources for a process group are freed together with it."""

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool
from torch import distributed

import normscope
from normscope._binding import ops

# How long threads may take to begin or to end, on a busy machine.
PATIENCE_SECONDS = 30.0

# How long they must stay the same to be counted: a new thread has its name a moment later.
SETTLED_SECONDS = 1.0

# What a rank returns: by name, the numbers of threads.
Threads = dict[str, set[str]]


def threads_of_gloo() -> set[str]:
    """Return the numbers of the threads of this process that work for process groups."""
    threads = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if "gloo" in (task / "comm").read_text():
                threads.add(task.name)
    return threads


def threads_since(earlier: set[str]) -> set[str]:
    """Return the threads that have begun since, as soon as there are some and no more begin."""
    begun: set[str] = set()
    start = since = time.monotonic()
    while time.monotonic() - since < (SETTLED_SECONDS if begun else PATIENCE_SECONDS):
        now = threads_of_gloo() - earlier
        if now != begun and time.monotonic() - start < PATIENCE_SECONDS:
            begun, since = now, time.monotonic()
        time.sleep(0.05)
    return begun


def those_that_stay(threads: set[str], at_most: int = 0) -> set[str]:
    """Return those of the threads that have not ended, as soon as they are at most so many."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(left := threads & threads_of_gloo()) > at_most and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def threads_of_a_group() -> Threads:
    """Make a group and parts of it, and destroy the group."""
    earlier = threads_of_gloo()
    group = distributed.new_group()
    distributed.barrier(group)
    of_the_group = threads_since(earlier)
    of_its_parts = threads_of_parts(group)
    distributed.destroy_process_group(group)
    del group
    gc.collect()
    return {
        "group": of_the_group,
        "parts": of_its_parts,
        "left of group": those_that_stay(of_the_group),
        "left of parts": those_that_stay(of_its_parts),
    }


def threads_of_the_default_group() -> Threads:
    """Make parts of the default group, and destroy it."""
    distributed.barrier()
    earlier = threads_since(set())
    of_its_parts = threads_of_parts(None)
    distributed.destroy_process_group()
    gc.collect()
    return {
        "group": earlier,
        "parts": of_its_parts,
        # Those of other groups stay.
        "left of group": those_that_stay(earlier, at_most=len(earlier) - 1),
        "left of parts": those_that_stay(of_its_parts),
    }


def threads_of_a_program() -> Threads:
    """Make parts of the default group, and call what the interpreter calls at its exit."""
    distributed.barrier()
    of_its_parts = threads_of_parts(None)
    ops.forget_groups()
    left_of_its_parts = those_that_stay(of_its_parts)
    distributed.barrier()  # the group itself still works
    return {"parts": of_its_parts, "left of parts": left_of_its_parts}


def threads_of_parts(group: distributed.ProcessGroup | None) -> set[str]:
    """Run a layer whose scope is two ranks of the group, and return the threads that this began."""
    earlier = threads_since(set())
    normscope.BatchNorm1d(3, scope="group:2", process_group=group)(torch.randn(4, 3))
    return threads_since(earlier)


WITHOUT_SHARED_MEMORY = {"NORMSCOPE_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("function", [threads_of_a_group, threads_of_the_default_group])
def test_parts_end_with_their_group(ranks: RankPool, function: Callable[[], Threads]) -> None:
    for threads in ranks.run(4, function, environment=WITHOUT_SHARED_MEMORY):
        assert threads["parts"]
        assert not threads["left of parts"]
        assert threads["left of group"] < threads["group"]


def test_parts_end_before_the_interpreter(ranks: RankPool) -> None:
    for threads in ranks.run(4, threads_of_a_program, environment=WITHOUT_SHARED_MEMORY):
        assert threads["parts"]
        assert not threads["left of parts"]
