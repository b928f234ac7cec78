# SPDX-License-Identifier: Apache-2.0
"""Runs functions on ranks, which are new processes, and measures layers there."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import TypeVar

import torch
from torch import distributed

from cases import Arrangement, Case
from kernels import Kernels
from table import row
from timing import Samples, Timing, passes, sample, timing_of

Answer = TypeVar("Answer")

# The time after which a rank stops waiting for one that has failed.
GROUP_LIMIT = timedelta(seconds=60)

# Seconds for the ranks to agree on a start time; longer than Gloo needs.
LEAD = 0.01


@dataclass(frozen=True)
class Plan:
    """The work of every process.

    Args:
        arrangement: The processes and threads.
        cases: The inputs.
        rounds: The number of times that each case is timed.
        library: The compiled ``kernels.cpp``; None to leave the kernels out.
    """

    arrangement: Arrangement
    cases: list[Case]
    rounds: int
    library: Path | None


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    arrangement: Arrangement
    case: Case
    timing: Timing


def on_ranks(
    count: int,
    work: Callable[..., Answer],
    *arguments: object,
    limit: timedelta | None = GROUP_LIMIT,
) -> list[Answer]:
    """Call a function in new processes, and return its results in the order of the ranks.

    Args:
        count: The number of processes. They have a default process group if they are several.
        work: A function at the top of a module.
        *arguments: Its arguments.
        limit: The time after which a rank stops waiting for the others; None for torch's default.
    """
    with (
        tempfile.TemporaryDirectory(prefix="normscope-ranks-") as folder,
        ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes,
    ):
        store = Path(folder, "store").as_uri()
        futures = [
            processes.submit(_rank, rank, count, store, limit, work, arguments)
            for rank in range(count)
        ]
        return [future.result() for future in futures]


def _rank(
    rank: int,
    count: int,
    store: str,
    limit: timedelta | None,
    work: Callable[..., Answer],
    arguments: tuple[object, ...],
) -> Answer:
    """Run one process, from joining the others to leaving them."""
    if count == 1:
        return work(*arguments)
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=count, timeout=limit
    )
    answer = work(*arguments)
    distributed.barrier()  # none leaves while another still exchanges
    distributed.destroy_process_group()
    return answer


def measure(plan: Plan) -> list[Result]:
    """Start the processes, measure every case, and print each row immediately."""
    results, *_ = on_ranks(plan.arrangement.processes, _measure_as_rank, plan)
    return results


def _measure_as_rank(plan: Plan) -> list[Result]:
    """Do the work of one process."""
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    arrangement = plan.arrangement
    torch.set_num_threads(arrangement.threads)
    torch.manual_seed(rank)
    kernels = None if plan.library is None else Kernels(plan.library, arrangement.threads)
    results = []
    for case in plan.cases:
        made = passes(case, arrangement.scope, kernels)
        timing = timing_of(_mean_over_ranks(sample(case, made, plan.rounds, _start_together)))
        results.append(Result(arrangement, case, timing))
        if rank == 0:
            print(row(case, timing), flush=True)
    return results


def _start_together() -> None:
    """Wait for all ranks, and continue within microseconds of each other.

    Ranks that share a core leave a barrier milliseconds apart: the first would be timed while the
    others do nothing.
    """
    if not distributed.is_initialized():
        return
    start = torch.tensor(monotonic() + LEAD, dtype=torch.float64)
    distributed.all_reduce(start, distributed.ReduceOp.MAX)
    sleep(max(0.0, start.item() - monotonic()))


def _mean_over_ranks(samples: Samples) -> Samples:
    """Return the mean over ranks, because those on the same core do not get equal shares of it."""
    if not distributed.is_initialized():
        return samples
    for seconds in samples.values():
        distributed.all_reduce(seconds)
        seconds /= distributed.get_world_size()
    return samples
