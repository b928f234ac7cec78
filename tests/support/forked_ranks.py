# SPDX-License-Identifier: Apache-2.0
"""Ranks in processes that a test may stop or kill."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from rank_pool import CONTEXT


def free_port() -> int:
    """Return a port that is free, and that no connection gets from the system."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def started(
    target: Callable[..., None], *arguments: object, size: int
) -> Iterator[tuple[list[BaseProcess], list[Connection]]]:
    """Start ``target(store, rank, size, *arguments, connection)`` on ranks; in the end kill them.

    Rank 0's process has the store. Yields the processes, and this end of each connection.
    """
    store = f"tcp://127.0.0.1:{free_port()}"
    pipes = [CONTEXT.Pipe() for _ in range(size)]
    processes: list[BaseProcess] = [
        CONTEXT.Process(
            target=target, args=(store, rank, size, *arguments, pipes[rank][1]), daemon=True
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        yield processes, [pipe for pipe, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def answers_of(connections: list[Connection], seconds: float) -> list[object]:
    """Return the next answer of each rank, and fail if one does not come within the time."""
    deadline = time.monotonic() + seconds
    for connection in connections:
        assert wait([connection], timeout=max(0.0, deadline - time.monotonic())), "a rank hangs"
    return [connection.recv() for connection in connections]
