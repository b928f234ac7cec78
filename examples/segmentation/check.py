# SPDX-License-Identifier: Apache-2.0
"""Checks that a scope decides the training, and not the number of processes.

Over the first steps, slices in one process train as local or groups on as many ranks do, and world
on all ranks as one process with the whole global batch. Started by torchrun, once a rank.

The check runs in float64 with the weights and scenes of the training. AdamW divides a gradient by
its own size, so in float32 the rounding of a gradient near zero is enough to turn a parameter's
step around, and a tolerance that allows for it would let anything pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from rank import Rank, parse_arguments, run_as_rank
from results import CHECK_FILE, Comparison, save_comparisons
from scenes import SceneSource
from settings import SIDE, Settings, norm_batch_size
from training import LEARNING_RATE, Trainer

STEPS = 5


@dataclass(frozen=True)
class Trace:
    """Losses of the first steps [STEPS], and the network's state after them."""

    losses: torch.Tensor
    state: dict[str, torch.Tensor]


def trace(source: SceneSource, settings: Settings, scope: str, share: range) -> Trace:
    """Takes the first steps in float64."""
    trainer = Trainer(source, settings, settings.seeds[0], scope, share, torch.float64)
    losses = torch.stack([trainer.step(step) for step in range(STEPS)])
    if len(share) < settings.global_batch:
        dist.all_reduce(losses)
    return Trace(losses, trainer.network.state_dict())


def difference(one: Trace, other: Trace) -> float:
    """Largest difference of two numbers of a kind, relative to the kind's largest number."""
    pairs = [(one.losses, other.losses)]
    pairs += [(value, other.state[name]) for name, value in one.state.items()]
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
    return STEPS * LEARNING_RATE / adam_eps * math.sqrt(pixels) * eps


def in_one_process(scope: str, settings: Settings) -> str:
    """The scope by which one process with the global batch does what all ranks do."""
    images = norm_batch_size(scope, settings.ranks, settings.images_per_rank)
    parts = settings.global_batch // images
    return "local" if parts == 1 else f"slices:{parts}"


def compare(source: SceneSource, settings: Settings, rank: Rank, scope: str) -> Comparison | None:
    """Trains `scope` on all ranks, and on rank 0 what should be the same in one process."""
    together = trace(source, settings, scope, rank.share(settings.global_batch))
    if rank.number != 0:
        return None
    stand_in = in_one_process(scope, settings)
    alone = trace(source, settings, stand_in, range(settings.global_batch))
    return Comparison(
        ranks=f"{scope} on {rank.count} ranks",
        alone=f"{stand_in} in one process with the global batch",
        steps=STEPS,
        difference=difference(together, alone),
        tolerance=tolerance(settings),
    )


@record
def main() -> None:
    """Compares; rank 0 writes the outcome."""
    settings, scopes, output = parse_arguments(__doc__)

    def check(rank: Rank) -> None:
        source = settings.source()
        comparisons = [compare(source, settings, rank, scope) for scope in scopes]
        if rank.number == 0:
            save_comparisons([c for c in comparisons if c is not None], output / CHECK_FILE)

    run_as_rank(check)


if __name__ == "__main__":
    main()
