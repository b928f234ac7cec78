# SPDX-License-Identifier: Apache-2.0
"""Trains networks under scopes in four processes on this machine."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed

import normscope
from normscope.training import communication_counters
from ranks import on_ranks
from scope_results import Result
from scope_rules import steps_of_a_plan
from scope_tasks import IMAGES_PER_RANK, RANKS, Task, make_task

# The time after which a rank stops waiting for one that has failed.
GROUP_LIMIT = timedelta(minutes=5)


def train_on_ranks(task: str, scopes: str, seed: int) -> Result:
    """Train under local, world, progressive, or the plan for a wanted number."""
    result, *_ = on_ranks(RANKS, train_as_rank, task, scopes, seed, limit=GROUP_LIMIT)
    return result


def train_as_rank(task_name: str, scopes: str, seed: int) -> Result:
    """Train on one rank of the default process group."""
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    share = range(rank * IMAGES_PER_RANK, (rank + 1) * IMAGES_PER_RANK)
    task = make_task(task_name, seed, share)
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
