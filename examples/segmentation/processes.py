# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this machine."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def start_ranks(work: Callable[..., None], ranks: int, *arguments: object) -> None:
    """Calls `work(rank, *arguments)` in processes that form the default process group, and waits.

    As soon as one rank fails, the others are ended; an exception that a signal handler raises
    meanwhile ends all of them.

    Raises:
        torch.multiprocessing.ProcessRaisedException: if a rank raised, with its traceback.
        torch.multiprocessing.ProcessExitedException: if a rank left with a status other than 0.
    """
    # A thread that spins while it waits for others takes the core that they are waiting for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        # Daemons end with this process, whatever ends it.
        spawn(_run_rank, (meeting, work, ranks, arguments), nprocs=ranks, daemon=True)


def _run_rank(
    rank: int, meeting: str, work: Callable[..., None], ranks: int, arguments: tuple[object, ...]
) -> None:
    # Rank 0 may train alone for long; a rank that fails ends the others without a time limit.
    patience = datetime.timedelta(days=1)
    dist.init_process_group("gloo", meeting, patience, world_size=ranks, rank=rank)
    torch.set_num_threads(max(1, cores() // ranks))
    torch.use_deterministic_algorithms(mode=True)
    # What it has made is gone before the group is: a DistributedDataParallel that held the group's
    # last reference would end it holding the interpreter's lock, which Gloo's thread may need.
    work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
