# SPDX-License-Identifier: Apache-2.0
"""First meetings of ranks in which one fails, or the process with the store stops or dies."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from forked_ranks import answers_of, started
from rank_pool import connect_ranks, error_of

import normscope

LIMIT_SECONDS = 2.0
HANG_SECONDS = 40.0


def forward() -> torch.Tensor:
    layer = normscope.BatchNorm1d(4)
    layer.layer_name = "stem"
    y: torch.Tensor = layer(torch.randn(8, 4))
    return y


def meet(store: str, rank: int, size: int, seconds: float, connection: Connection) -> None:
    """Connect, report it, and run a first forward when told to; report its error."""
    os.environ["NORMSCOPE_TIMEOUT"] = str(seconds)
    torch.set_num_threads(1)
    connect_ranks(store, rank, size)
    connection.send(os.getpid())
    connection.recv()
    connection.send(error_of(forward))
    signal.pause()  # others may need the store


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stop(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    while not is_stopped(process.pid):
        time.sleep(0.01)


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def stop_for_a_while(process: BaseProcess) -> None:
    stop(process)
    assert process.pid is not None
    threading.Timer(1.0, os.kill, (process.pid, signal.SIGCONT)).start()


def errors_of_peers(happens: Callable[[BaseProcess], None], seconds: float) -> list[object]:
    """Return the errors of ranks 1 and 2 in a meeting before which something happens to rank 0."""
    with started(meet, seconds, size=3) as (processes, pipes):
        answers_of(pipes, HANG_SECONDS)
        happens(processes[0])
        for pipe in pipes if happens is not kill else pipes[1:]:
            pipe.send("go")
        return answers_of(pipes[1:], HANG_SECONDS)


@pytest.mark.parametrize("happens", [stop, kill])
def test_no_rank_hangs_if_the_store_s_process_stops_or_dies_before_the_first_meeting(
    happens: Callable[[BaseProcess], None],
) -> None:
    for error in errors_of_peers(happens, LIMIT_SECONDS):
        assert isinstance(error, str)
        assert error.startswith("the group's rendezvous, by stem (scope world): ")
        assert "rank 0" in error


def test_a_stop_shorter_than_the_limit_is_only_a_delay() -> None:
    assert errors_of_peers(stop_for_a_while, 30.0) == ["", ""]


def meet_without_threads(store: str, rank: int, size: int, connection: Connection) -> None:
    """Report the errors of a first forward and of one more; rank 1 cannot start threads."""
    torch.set_num_threads(1)
    connect_ranks(store, rank, size)
    if rank == 1:
        if os.getuid() == 0:
            os.setuid(65534)  # the limit does not apply to root
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    connection.send([error_of(forward, RuntimeError) for _ in range(2)])
    signal.pause()


def test_a_rank_that_cannot_start_threads_is_named_to_its_peers() -> None:
    with started(meet_without_threads, size=2) as (_, pipes):
        answers = answers_of(pipes, HANG_SECONDS)

    for errors in zip(*answers, strict=True):
        of_peer, own = errors
        assert "the group's rendezvous, by stem" in of_peer
        assert "rank 1 failed: torch.distributed made no group" in of_peer
        assert "torch.distributed made no group" in own
