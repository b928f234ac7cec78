# SPDX-License-Identifier: Apache-2.0
"""Trains networks under scopes in a process per rank on this machine."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from torch import distributed

import normscope
from normscope.training import communication_counters
from ranks import on_ranks
from scope_measures import layers_of, steps_of_a_plan
from scope_results import Result
from scope_rules import MEASURED_AT
from scope_tasks import Setting, Task

# The time after which a rank stops waiting for one that has failed.
GROUP_LIMIT = timedelta(minutes=5)


def train_on_ranks(setting: Setting, scopes: str, seed: int) -> Result:
    """Train under local, world, or the recommendation after 100 steps."""
    result, *_ = on_ranks(setting.ranks, train_as_rank, setting, scopes, seed, limit=GROUP_LIMIT)
    return result


def train_as_rank(setting: Setting, scopes: str, seed: int) -> Result:
    """Train on one rank of the default process group."""
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    share = range(rank * setting.images, (rank + 1) * setting.images)
    task = Task(setting, seed, share)
    batches = [task.images(step) for step in steps_of_a_plan(task)]
    normscope.set_scope(task.model, "local" if scopes == "local" else "world")
    world_bytes = 2 * sum(
        layer.exchange_bytes
        for layer in normscope.recommend_scopes(task.model, batches[:1], 0).layers
    )
    sent = last = communication_counters().bytes
    measured = 0
    start = 0.0
    for step in range(task.steps):
        if step == MEASURED_AT and scopes == "recommended":
            before = communication_counters().bytes
            normscope.recommend_scopes(task.model, batches).apply(task.model)
            measured = communication_counters().bytes - before
        if step == MEASURED_AT:
            start = time.perf_counter()
        last = communication_counters().bytes
        task.step(step)
    end = communication_counters().bytes
    seconds = time.perf_counter() - start
    normscope.estimate_running_stats(task.model, batches)
    layers = layers_of(task.model)
    wide = {name: str(layer.scope) for name, layer in layers.items() if str(layer.scope) != "local"}
    return Result(
        str(setting),
        scopes,
        seed,
        task.quality(),
        (end - sent - measured) / (world_bytes * task.steps),
        (end - last) / world_bytes,
        len(wide) / len(layers),
        wide,
        setting.ranks,
        seconds / (task.steps - MEASURED_AT),
    )
