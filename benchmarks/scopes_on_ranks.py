# SPDX-License-Identifier: Apache-2.0
"""Trains networks under scopes in four processes on this machine."""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

import normscope
from normscope.training import communication_counters
from scope_results import Result
from scope_rules import steps_of_a_plan
from scope_tasks import IMAGES_PER_RANK, RANKS, Task, make_task

# The time after which a rank stops waiting for one that has failed.
GROUP_LIMIT = timedelta(minutes=5)


class Ranks(AbstractContextManager["Ranks"]):
    """Processes that train several networks, one after the other."""

    def __init__(self) -> None:
        self._processes = ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn"))

    def train(self, task: str, scopes: str, seed: int, steps: int | None = None) -> Result:
        """Train under local, world, progressive, or the plan for a wanted number."""
        with tempfile.TemporaryDirectory(prefix="normscope-ranks-") as folder:
            store = Path(folder, "store").as_uri()
            futures = [
                self._processes.submit(_rank, rank, store, task, scopes, seed, steps)
                for rank in range(RANKS)
            ]
            results = [future.result() for future in futures]
            return results[0]

    def __exit__(self, *_: object) -> None:
        """Stop the processes."""
        self._processes.shutdown()


def _rank(
    rank: int, store: str, task_name: str, scopes: str, seed: int, steps: int | None
) -> Result:
    """Run one process, from joining the others to leaving them."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=GROUP_LIMIT
    )
    result = train_as_rank(task_name, scopes, seed, steps)
    distributed.barrier()
    distributed.destroy_process_group()
    return result


def train_as_rank(task_name: str, scopes: str, seed: int, steps: int | None = None) -> Result:
    """Train on one rank of the default process group."""
    rank = distributed.get_rank()
    share = range(rank * IMAGES_PER_RANK, (rank + 1) * IMAGES_PER_RANK)
    task = make_task(task_name, seed, steps, share)
    batches = [task.images(step) for step in steps_of_a_plan(task)]
    schedule = _schedule(task, scopes, batches)
    before = communication_counters()
    for step in range(task.steps):
        task.step(step)
        if schedule is not None:
            schedule.step()
    after = communication_counters()
    normscope.estimate_running_stats(task.model, batches)
    layers = [
        (name, layer)
        for name, layer in task.model.named_modules()
        if isinstance(layer, normscope.BatchNorm)
    ]
    world = normscope.recommend_scopes(task.model, batches, float("inf"))
    return Result(
        task_name,
        scopes,
        seed,
        task.quality(),
        (after.calls - before.calls) / (world.exchanges_per_step * task.steps),
        (after.bytes - before.bytes) / (world.bytes_per_step * task.steps),
        {name: str(layer.scope) for name, layer in layers if str(layer.scope) != "local"},
        RANKS,
    )


def _schedule(
    task: Task, scopes: str, batches: list[torch.Tensor]
) -> normscope.ProgressiveScope | None:
    """Set the initial scopes of the layers; return the schedule that changes them, if any."""
    if scopes in ("local", "world"):
        normscope.set_scope(task.model, scopes)
        return None
    if scopes == "progressive":
        return normscope.ProgressiveScope.doubling(task.model, task.steps)
    normscope.recommend_scopes(task.model, batches, float(scopes)).apply(task.model)
    return None
