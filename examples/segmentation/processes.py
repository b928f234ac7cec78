# SPDX-License-Identifier: Apache-2.0
"""Starts ranks as processes on this machine."""

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

    As soon as one rank fails, the others are stopped.

    Raises:
        torch.multiprocessing.spawn.ProcessException: if a rank failed.
    """
    # Threads that spin while they wait would occupy the cores that other threads need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with tempfile.TemporaryDirectory() as folder:
        # Daemons are stopped when this process ends, for whatever reason.
        spawn(_run_rank, (folder, work, ranks, *arguments), nprocs=ranks, daemon=True)


def _run_rank(rank: int, folder: str, work: Work, ranks: int, *arguments: object) -> None:
    # Rank 0 may train alone for a long time. A failing rank stops the others without a time limit.
    patience = datetime.timedelta(days=1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", patience, ranks, rank)
    share_cores(ranks)
    torch.use_deterministic_algorithms(mode=True)
    # All objects of `work` are freed before the group. If a DistributedDataParallel held the last
    # reference to the group, the group would be destroyed with the interpreter's lock held, which
    # Gloo's thread may need.
    work(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def share_cores(processes: int) -> None:
    """Limits this process to its share of the cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
