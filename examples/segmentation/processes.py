# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this machine."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

Work = Callable[..., None]


def start_ranks(work: Work, ranks: int, *arguments: object) -> None:
    """Calls `work(rank, *arguments)` in processes that form the default process group, and waits.

    As soon as one rank fails, the others are ended.

    Raises:
        torch.multiprocessing.spawn.ProcessException: if a rank failed.
    """
    # A thread that spins while it waits for others takes the core that they are waiting for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as folder:
        # Daemons end with this process, whatever ends it.
        spawn(_run_rank, (folder, work, ranks, *arguments), nprocs=ranks, daemon=True)


def _run_rank(rank: int, folder: str, work: Work, ranks: int, *arguments: object) -> None:
    # Rank 0 may train alone for long; a rank that fails ends the others without a time limit.
    patience = datetime.timedelta(days=1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", patience, ranks, rank)
    share_cores(ranks)
    torch.use_deterministic_algorithms(mode=True)
    # What it has made is gone before the group is: a DistributedDataParallel that held the group's
    # last reference would end it holding the interpreter's lock, which Gloo's thread may need.
    work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def share_cores(processes: int) -> None:
    """Gives this process its part of the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
