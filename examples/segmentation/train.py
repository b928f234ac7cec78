# SPDX-License-Identifier: Apache-2.0
"""Trains under one scope from one seed, and measures what that came to and what it cost."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from tqdm import tqdm

import normscope
from scenes import Batch, SceneSource
from settings import Settings
from trainer import Trainer

EVALUATIONS = 8

# Steps that the progress bar's loss is a mean of; one rank's part of one batch is mostly noise.
RECENT_STEPS = 50

# Held-out scenes whose predictions the report shows.
SHOWN_SCENES = 6


@dataclass
class Training:
    """What is told about one scope trained from one seed.

    Args:
        processes: that shared the global batch.
        stages: the scopes, as normscope spells them, by the step at which each began.
        norm_batch_sizes: images that one set of statistics was computed over, stage by stage.
        plan: of scopes that were recommended.
        losses: of the global batch at every step.
        evaluated_steps: number of steps done at each evaluation.
        mean_ious: on held-out scenes, at each evaluation.
        seconds: that all steps took, without the evaluations.
        synchronization_share: part of them spent in the collectives of batch normalization,
            waiting for other ranks included; mean over the ranks.
        exchanges_per_step: those collectives, forward and backward.
        bytes_per_step: payload that a rank sends in them.
        predictions: classes of the first held-out scenes, [SHOWN_SCENES, side, side].
    """

    scope: str
    seed: int
    processes: int
    stages: dict[int, str] = field(default_factory=dict)
    norm_batch_sizes: list[str] = field(default_factory=list)
    plan: normscope.ScopePlan | None = None
    losses: list[float] = field(default_factory=list)
    evaluated_steps: list[int] = field(default_factory=list)
    mean_ious: list[float] = field(default_factory=list)
    seconds: float = 0.0
    synchronization_share: float = 0.0
    exchanges_per_step: float = 0.0
    bytes_per_step: float = 0.0
    predictions: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)


def train(
    source: SceneSource,
    held_out: Batch,
    settings: Settings,
    seed: int,
    scope: str,
    share: range,
    group: dist.ProcessGroup,
) -> Training:
    """Trains on a share of each global batch, together with the group's ranks.

    All ranks estimate the running statistics of an evaluation; the group's rank 0, which then has
    the same as the others, evaluates.
    """
    leads = dist.get_rank(group) == 0
    trainer = Trainer(source, settings, seed, scope, share)
    result = Training(scope, seed, dist.get_world_size(group), plan=trainer.plan)
    synchronizing = 0.0
    losses = torch.zeros(settings.steps)
    with tqdm(
        total=settings.global_batch * settings.steps,
        desc=f"{scope:>11}, seed {seed}",
        unit=" images",
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        disable=not leads,
    ) as bar:
        for step in range(settings.steps):
            if trainer.scope not in result.stages.values():
                result.stages[step] = trainer.scope
                result.norm_batch_sizes.append(trainer.norm_batch_sizes)
            before, start = normscope.communication_counters(), time.perf_counter()
            losses[step] = trainer.step(step)
            result.seconds += time.perf_counter() - start
            after = normscope.communication_counters()
            synchronizing += after.seconds - before.seconds
            result.exchanges_per_step += (after.calls - before.calls) / settings.steps
            result.bytes_per_step += (after.bytes - before.bytes) / settings.steps
            recent = losses[max(0, step + 1 - RECENT_STEPS) : step + 1]
            bar.set_postfix(loss=f"{float(recent.mean()):.3f}", refresh=False)
            bar.update(settings.global_batch)
            if is_evaluated_after(step, settings.steps):
                trainer.estimate_running_stats(group)
                if leads:
                    result.evaluated_steps.append(step + 1)
                    result.mean_ious.append(trainer.evaluate(held_out))
                # Else the others' next step would have begun, and its time would count.
                dist.barrier(group)
    means = torch.cat([losses, torch.tensor([synchronizing / result.seconds])])
    dist.all_reduce(means, group=group)
    *result.losses, result.synchronization_share = (means / result.processes).tolist()
    result.predictions = trainer.predict(held_out.images[:SHOWN_SCENES])
    return result


def is_evaluated_after(step: int, steps: int) -> bool:
    """Spreads the evaluations evenly, the last one after the last step.

    Example:
        >>> [step + 1 for step in range(80) if is_evaluated_after(step, 80)]
        [10, 20, 30, 40, 50, 60, 70, 80]
    """
    return (step + 1) * EVALUATIONS // steps > step * EVALUATIONS // steps
