# SPDX-License-Identifier: Apache-2.0
"""Checks that a scope decides the training, and not the number of processes.

Over the first steps, slices in one process train as local or groups on as many ranks do, and world
on all ranks as one process with the whole global batch.

The check runs in float64 with the weights and scenes of the training. AdamW divides a gradient by
its own size, so in float32 the rounding of a gradient near zero is enough to turn a parameter's
step around, and a tolerance that allows for it would let anything pass.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from scenes import SceneSource
from settings import SIDE, Settings
from trainer import LARGEST_LEARNING_RATE, Trainer

STEPS = 5


@dataclass(frozen=True)
class Comparison:
    """How far two ways to train are apart after the first steps, and how far they may be."""

    ranks: str
    alone: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether both train alike; NaN does not pass."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{'ok' if self.passed else 'FAILED'}: {self.ranks} trains as {self.alone}: after "
            f"{STEPS} steps they differ by {self.difference:.1e} (at most {self.tolerance:.1e} is "
            "rounding)"
        )


def compare(
    source: SceneSource, settings: Settings, seed: int, scope: str, rank: int
) -> Comparison | None:
    """Trains `scope` on all ranks, and on rank 0, which tells, what should be the same alone."""
    settings = dataclasses.replace(settings, steps=max(settings.steps, STEPS))
    together = first_steps(source, settings, seed, scope, settings.share(rank))
    if rank != 0:
        return None
    parts = settings.global_batch // settings.norm_batch_size(scope)
    stand_in = "local" if parts == 1 else f"slices:{parts}"
    alone = first_steps(source, settings, seed, stand_in, range(settings.global_batch))
    return Comparison(
        f"{scope} on {settings.ranks} ranks",
        f"{stand_in} in one process with the global batch",
        difference(together, alone),
        tolerance(settings),
    )


def first_steps(
    source: SceneSource, settings: Settings, seed: int, scope: str, share: range
) -> dict[str, torch.Tensor]:
    """Takes the first steps in float64; the network's state after them, and the losses."""
    trainer = Trainer(source, settings, seed, scope, share, torch.float64)
    losses = torch.stack([trainer.step(step) for step in range(STEPS)])
    if len(share) < settings.global_batch:
        dist.all_reduce(losses)
        losses /= settings.ranks
    return {**trainer.network.state_dict(), "losses": losses}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of two numbers of a kind, relative to the kind's largest number."""
    pairs = [(value, other[name]) for name, value in one.items()]
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1)) for a, b in pairs)


def tolerance(settings: Settings) -> float:
    """Bounds what rounding alone can do.

    A gradient is a sum over n pixels; in another order its relative error is about sqrt(n) * eps.
    Gradients here are below 1. AdamW turns an error e of a gradient near zero into an error
    learning_rate / adam_eps * e of the parameter, at each step.
    """
    pixels = settings.global_batch * SIDE**2
    adam_eps = 1e-8
    eps = torch.finfo(torch.float64).eps
    return STEPS * LARGEST_LEARNING_RATE / adam_eps * math.sqrt(pixels) * eps
