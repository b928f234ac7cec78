# SPDX-License-Identifier: Apache-2.0
"""Measures in processes of their own, as many as an arrangement has."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from cases import Arrangement, Case
from table import row
from timing import Timing, passes, sample, timing_of

# When a rank stops waiting for one that has failed.
GROUP_LIMIT = timedelta(seconds=60)


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    arrangement: Arrangement
    case: Case
    timing: Timing


def measure(arrangement: Arrangement, cases: list[Case], rounds: int) -> list[Result]:
    """Start the processes, measure every case and print its row as soon as it is known."""
    with (
        tempfile.TemporaryDirectory(prefix="normscope-bench-") as folder,
        ProcessPoolExecutor(
            arrangement.processes, multiprocessing.get_context("spawn")
        ) as processes,
    ):
        futures = [
            processes.submit(_rank, rank, arrangement, cases, rounds, Path(folder, "store"))
            for rank in range(arrangement.processes)
        ]
        results, *_ = [future.result() for future in futures]
        return results


def _rank(
    rank: int, arrangement: Arrangement, cases: list[Case], rounds: int, store: Path
) -> list[Result]:
    """What one process does."""
    torch.set_num_threads(arrangement.threads)
    torch.manual_seed(rank)
    results = []
    with _joined(rank, arrangement.processes, store) as align:
        for case in cases:
            samples = sample(case, passes(case, arrangement.scope), rounds, align)
            timing = timing_of(_mean_over_ranks(samples))
            results.append(Result(arrangement, case, timing))
            if rank == 0:
                print(row(case, timing), flush=True)
    return results


@contextlib.contextmanager
def _joined(rank: int, processes: int, store: Path) -> Iterator[Callable[[], None]]:
    """Join the other ranks, if there are any, and yield what waits for all of them."""
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
    yield distributed.barrier
    distributed.destroy_process_group()


def _mean_over_ranks(samples: torch.Tensor) -> torch.Tensor:
    """The mean, since ranks that share a core do not get equal shares of it."""
    if not distributed.is_initialized():
        return samples
    distributed.all_reduce(samples)
    return samples / distributed.get_world_size()
