# SPDX-License-Identifier: Apache-2.0
"""The library's resources for a process group are freed together with it."""

import gc
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool
from torch import distributed

import normscope
from normscope._binding import ops

# How long the number of threads must stay the same: a new thread has its name a moment later.
SETTLED_SECONDS = 1.0


# How long threads that have ended may be listed, on a busy machine.
ENDED_SECONDS = 20.0


def threads_of_gloo() -> int:
    """Return the number of threads of this process that work for process groups."""
    count, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                names.append((task / "comm").read_text())
        now = sum("gloo" in name for name in names)
        if now != count:
            count, since = now, time.monotonic()
        time.sleep(SETTLED_SECONDS / 20)
    return count


def threads_after_the_end(most: int) -> int:
    """Return the same number, as soon as it is at most ``most``."""
    deadline = time.monotonic() + ENDED_SECONDS
    while (count := threads_of_gloo()) > most and time.monotonic() < deadline:
        pass
    return count


def threads_around_the_end(kind: str) -> tuple[int, int, int]:
    """Count threads before parts of a group are made, with them, and after destroying the group."""
    group = distributed.new_group() if kind == "new" else None
    distributed.barrier(group)  # its threads run then, and have their names
    before = threads_of_gloo()
    normscope.BatchNorm1d(3, scope="group:2", process_group=group)(torch.randn(4, 3))
    with_parts = threads_of_gloo()
    distributed.destroy_process_group(group)
    del group
    gc.collect()
    return before, with_parts, threads_after_the_end(before - 1)


def threads_around_the_end_of_a_program() -> tuple[int, int, int]:
    """Do the same, but run the exit handlers of the interpreter instead of destroying the group."""
    before = threads_of_gloo()
    normscope.BatchNorm1d(3, scope="group:2")(torch.randn(4, 3))
    with_parts = threads_of_gloo()
    ops.forget_groups()
    return before, with_parts, threads_after_the_end(before)


WITHOUT_SHARED_MEMORY = {"NORMSCOPE_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("kind", ["new", "default"])
def test_parts_end_with_their_group(ranks: RankPool, kind: str) -> None:
    for before, with_parts, afterwards in ranks.run(
        4, threads_around_the_end, kind, environment=WITHOUT_SHARED_MEMORY
    ):
        assert afterwards < before < with_parts


def test_parts_end_before_the_interpreter(ranks: RankPool) -> None:
    for before, with_parts, afterwards in ranks.run(
        4, threads_around_the_end_of_a_program, environment=WITHOUT_SHARED_MEMORY
    ):
        assert afterwards == before < with_parts
