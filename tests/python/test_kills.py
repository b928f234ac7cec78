# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed, stopped, or run for a long time, over every transport."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from data_parallel import data_parallel
from forked_ranks import answers_of, started
from rank_pool import RankPool, connect_ranks
from torch import distributed

import normscope

TRANSPORTS = {"shared memory": "1", "gloo": "0"}
LIMIT_SECONDS = 60.0


def train_until_an_error(
    store: str,
    rank: int,
    size: int,
    scope: str,
    transport: str,
    child_of: int | None,
    connection: Connection,
) -> None:
    """Report the start of the steps, then the error that ended them and the time.

    The child of a rank holds its connections open, as a worker of a data loader does.
    """
    os.environ["NORMSCOPE_SHARED_MEMORY"] = TRANSPORTS[transport]
    torch.set_num_threads(1)
    connect_ranks(store, rank, size, LIMIT_SECONDS)
    net = normscope.convert(
        torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)), scope
    )
    net(torch.randn(8, 4)).sum().backward()
    if rank == child_of and os.fork() == 0:
        time.sleep(LIMIT_SECONDS / 2)
        os._exit(0)
    connection.send("begun")
    try:
        while True:
            net(torch.randn(8, 4)).sum().backward()
    except distributed.DistError as error:
        connection.send((str(error), time.monotonic()))
    # A normal exit would wait for the dead rank.
    os._exit(0)


def train_in_data_parallel(
    store: str, rank: int, size: int, scope: str, how: str, connection: Connection
) -> None:
    """The same with the buffers of DistributedDataParallel; rank 1 ends in the third step."""
    torch.set_num_threads(1)
    connect_ranks(store, rank, size, LIMIT_SECONDS)
    net = normscope.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    parallel = data_parallel(net, sends_buffers=True)
    connection.send("begun")
    try:
        for step in range(10):
            with normscope.fail_fast():
                if (rank, step) == (1, 2) and how == "raises":
                    raise ValueError("a bad sample")
                if (rank, step) == (1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                parallel(torch.randn(8, 4)).sum().backward()
    except (distributed.DistError, ValueError) as error:
        connection.send((str(error), time.monotonic()))
    time.sleep(1.0)  # the others are told by the store of rank 0
    os._exit(0)


@contextlib.contextmanager
def three_ranks(
    target: Callable[..., None], *arguments: object
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Start a function on three ranks, and wait until all have begun."""
    with started(target, *arguments, size=3) as (processes, connections):
        assert answers_of(connections, LIMIT_SECONDS / 2) == ["begun"] * 3
        yield processes, connections


def errors_after_a_kill(
    scope: str, transport: str, number: int, child_of: int | None = None
) -> list[tuple[str, float]]:
    """Return the errors of the other ranks after one is killed, with the seconds until then.

    Rank 0's process has the store, and ends with its own error.
    """
    moment = random.Random(number).uniform(0.0, 0.02)
    with three_ranks(train_until_an_error, scope, transport, child_of) as (processes, connections):
        time.sleep(moment)
        killed = time.monotonic()
        processes[1].kill()
        peers = [connections[0], *(connections[2:] if scope == "world" else [])]
        errors = answers_of(peers, LIMIT_SECONDS / 2)
    seconds = []
    for error in errors:
        assert isinstance(error, tuple)
        seconds.append((error[0], error[1] - killed))
    return seconds


def shared_memory() -> list[str]:
    """Return the files in shared memory, without semaphores, which other tests make."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))


# On an idle machine 0.1 s. Here several worlds share its cores.
PROMPT_SECONDS = 2.0


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("scope", "kills"), [("world", 70), ("group:2", 30)])
def test_a_rank_that_is_killed_is_named_to_its_peers(
    transport: str, scope: str, kills: int
) -> None:
    memory_before = shared_memory()

    with ThreadPoolExecutor(max_workers=4) as pool:
        runs = list(
            pool.map(lambda number: errors_after_a_kill(scope, transport, number), range(kills))
        )

    for errors in runs:
        for text, after in errors:
            # Rank 0 stays for a second. A rank that comes later finds both dead.
            assert re.search(r"(rank 1|ranks 0, 1) (of . )?(has|have) died", text)
            assert after < PROMPT_SECONDS
    assert shared_memory() == memory_before


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_whose_child_keeps_its_connections_is_named_to_its_peers(transport: str) -> None:
    for text, after in errors_after_a_kill("world", transport, 0, child_of=1):
        assert re.search(r"(rank 1|ranks 0, 1) (of . )?(has|have) died", text)
        assert after < PROMPT_SECONDS


@pytest.mark.parametrize(
    ("how", "text"), [("dies", "rank 1 of 3 has died"), ("raises", "ValueError: a bad sample")]
)
def test_a_rank_that_breaks_a_message_of_data_parallel_is_named(how: str, text: str) -> None:
    with three_ranks(train_in_data_parallel, "world", how) as (_, connections):
        errors = answers_of([connections[0], connections[2]], LIMIT_SECONDS / 2)

    for error in errors:
        assert isinstance(error, tuple)
        assert text in error[0]
        assert "rank 1" in error[0]


def rank_1_is_stopped_for(seconds: float) -> float:
    """Stop rank 1 for a while, as Ctrl-Z or a swapping machine would."""
    layer = normscope.BatchNorm1d(4)
    layer(torch.randn(8, 4))
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() == 1:
        store.set("process", str(os.getpid()))
    else:
        process = int(store.get("process"))
        os.kill(process, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)
    begin = time.monotonic()
    for _ in range(10):
        layer(torch.randn(8, 4)).sum().backward()
    return time.monotonic() - begin


def test_a_rank_that_is_stopped_for_a_while_is_only_late(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    assert max(ranks.run(2, rank_1_is_stopped_for, 1.0, environment=environment)) < LIMIT_SECONDS


def private_bytes() -> int:
    """Return the resident memory of this process, without the files that it maps."""
    match = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def growth_in_each_part(parts: int, steps: int) -> list[tuple[int, int]]:
    """Return how memory in bytes and open descriptors grow in each part but the first one."""
    net = normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(8)), "world")
    x = torch.randn(4, 8)
    sizes = []
    for _ in range(parts):
        for _ in range(steps):
            net(x).sum().backward()
        sizes.append((private_bytes(), len(os.listdir("/proc/self/fd"))))
    return [
        (memory_later - memory, files_later - files)
        for (memory, files), (memory_later, files_later) in pairwise(sizes)
    ]


SMALLEST_BLOCK = 32  # bytes, of glibc's malloc on 64-bit machines


@pytest.mark.slow
def test_twenty_thousand_steps_grow_nothing(ranks: RankPool, environment: dict[str, str]) -> None:
    parts, steps = 10, 2_000
    answers = ranks.run(
        2, growth_in_each_part, parts, steps, environment=environment, hang_seconds=280.0
    )

    for growths in answers:
        memory, files = zip(*growths, strict=True)
        # A leak grows in every part. An allocator that takes memory in advance does so once.
        assert statistics.median(memory) < SMALLEST_BLOCK * steps
        assert sum(files) <= 0
