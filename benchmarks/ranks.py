# SPDX-License-Identifier: Apache-2.0
"""Measures in new processes, as many as an arrangement has."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

import torch
from torch import distributed

from cases import Arrangement, Case
from kernels import Kernels
from table import row
from timing import Samples, Timing, passes, sample, timing_of

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


def measure(plan: Plan) -> list[Result]:
    """Start the processes, measure every case, and print each row immediately."""
    number = plan.arrangement.processes
    with (
        tempfile.TemporaryDirectory(prefix="normscope-bench-") as folder,
        ProcessPoolExecutor(number, multiprocessing.get_context("spawn")) as processes,
    ):
        futures = [
            processes.submit(_rank, rank, plan, Path(folder, "store")) for rank in range(number)
        ]
        results, *_ = [future.result() for future in futures]
        return results


def _rank(rank: int, plan: Plan, store: Path) -> list[Result]:
    """Do the work of one process."""
    arrangement = plan.arrangement
    torch.set_num_threads(arrangement.threads)
    torch.manual_seed(rank)
    kernels = None if plan.library is None else Kernels(plan.library, arrangement.threads)
    results = []
    with _joined(rank, arrangement.processes, store) as align:
        for case in plan.cases:
            samples = sample(case, passes(case, arrangement.scope, kernels), plan.rounds, align)
            timing = timing_of(_mean_over_ranks(samples))
            results.append(Result(arrangement, case, timing))
            if rank == 0:
                print(row(case, timing), flush=True)
    return results


@contextlib.contextmanager
def _joined(rank: int, processes: int, store: Path) -> Iterator[Callable[[], None]]:
    """Join the other ranks, if there are any, and yield a function that waits for all of them."""
    if processes == 1:
        yield lambda: None
        return
    distributed.init_process_group(
        "gloo",
        init_method=store.as_uri(),
        rank=rank,
        world_size=processes,
        timeout=GROUP_LIMIT,
    )
    yield _start_together
    distributed.destroy_process_group()


def _start_together() -> None:
    """Wait for all ranks, and continue within microseconds of each other.

    Ranks that share a core leave a barrier milliseconds apart: the first would be timed while the
    others do nothing.
    """
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
