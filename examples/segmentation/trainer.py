# SPDX-License-Identifier: Apache-2.0
"""Trains the network under one scope from one seed, and measures what that costs."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sklearn.metrics import jaccard_score
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import normscope
from network import SegmentationNetwork
from scenes import VOID, Batch, SceneSource, training_batch
from settings import PROGRESSIVE, RECOMMENDED, Settings

# Background fills most of a scene; with this weight it does not drown the other classes.
BACKGROUND_WEIGHT = 0.3

# Of a one-cycle schedule (Smith and Topin 2019), else as torch has it.
LARGEST_LEARNING_RATE = 2e-2

# Global batches that running statistics are estimated from before an evaluation, and scopes
# recommended from before the training.
ESTIMATION_BATCHES = 16

EVALUATIONS = 8

# Steps that the progress bar's loss is a mean of; one rank's part of one batch is mostly noise.
RECENT_STEPS = 50

# Held-out scenes whose predictions the report shows.
SHOWN_SCENES = 6


class Trainer:
    """One process' part: trains on its share of each global batch.

    Together the shares train as one process would.

    Args:
        source: where scenes come from.
        settings: of the run.
        seed: of the first weights and of the scenes.
        scope: of the batch normalization, or progressive or recommended.
        share: indices in the global batch that this process trains on. If that is not all of it,
            the process group's ranks hold the others, as many each.
    """

    def __init__(
        self, source: SceneSource, settings: Settings, seed: int, scope: str, share: range
    ) -> None:
        self.settings, self.seed, self.scope = settings, seed, scope
        self._source, self._share = source, share
        self._class_weights = torch.ones(len(source.class_names))
        self._class_weights[0] = BACKGROUND_WEIGHT
        torch.manual_seed(seed)
        self.network = normscope.convert(SegmentationNetwork(len(source.class_names)))
        layers = self.network.modules()
        self._layers = [layer for layer in layers if isinstance(layer, normscope.BatchNorm)]
        for layer in self._layers:
            # Of K slices only the first updates the running statistics, as rank 0's do of K ranks.
            layer.slice_stats = "first"
        self.plan: normscope.ScopePlan | None = None
        self._schedule: normscope.ProgressiveScope | None = None
        if scope == PROGRESSIVE:
            self._schedule = normscope.ProgressiveScope.doubling(self.network, settings.steps)
        elif scope == RECOMMENDED:
            self.plan = normscope.recommend_scopes(self.network, self.batches_to_come())
            self.plan.apply(self.network)
        else:
            normscope.set_scope(self.network, scope)
        # Each rank keeps its own running statistics: a broadcast would hide what a scope does.
        self._model: nn.Module = (
            self.network
            if len(share) == settings.global_batch
            else DistributedDataParallel(self.network, forward_sync_buffers=False)
        )
        self._optimizer = torch.optim.AdamW(self.network.parameters())
        self._learning_rates = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer, LARGEST_LEARNING_RATE, settings.steps, cycle_momentum=False
        )

    @property
    def scopes_of_layers(self) -> list[str]:
        """Those that the next step trains with, each once."""
        return list(dict.fromkeys(str(layer.scope) for layer in self._layers))

    def batch(self, step: int) -> Batch:
        """This share of global batch number `step`."""
        return training_batch(self._source, self.seed, step, self._share)

    def batches_to_come(self) -> list[torch.Tensor]:
        """This share's images that would be trained on after the last step."""
        return [self.batch(self.settings.steps + i).images for i in range(ESTIMATION_BATCHES)]

    def step(self, step: int) -> torch.Tensor:
        """Takes optimizer step number `step`.

        Returns:
            This share's loss; the mean over all shares is the global batch's.
        """
        images, masks = self.batch(step)
        logits = self._model.train()(images)
        # A mean over pixels, not over their weights: equal shares then have equal weight, and the
        # gradients that DistributedDataParallel averages are those of the global batch.
        loss = functional.cross_entropy(
            logits, masks, self._class_weights, ignore_index=VOID, reduction="none"
        ).mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._learning_rates.step()
        if self._schedule:
            self._schedule.step()
        return loss.detach()

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        """Predicts classes [n, SIDE, SIDE] with the running statistics as they are."""
        self.network.eval()
        with torch.no_grad():
            return torch.as_tensor(self.network(images).argmax(1))

    def evaluate(self, held_out: Batch) -> float:
        """Mean intersection over union on scenes that were not trained on."""
        return mean_iou(self.predict(held_out.images), held_out.masks)


def mean_iou(predictions: torch.Tensor, masks: torch.Tensor) -> float:
    """Mean over the classes of intersection over union; void pixels do not count.

    A class that is neither there nor predicted says nothing, and is left out.

    Example:
        >>> mean_iou(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        0.5
    """
    known = masks != VOID
    of_classes = jaccard_score(masks[known], predictions[known], average=None)
    return float(torch.from_numpy(of_classes).mean())


@dataclass
class Training:
    """What is told about one scope trained from one seed."""

    scope: str
    seed: int
    processes: int  # that shared the global batch
    plan: normscope.ScopePlan | None  # of scopes that were recommended
    evaluated_steps: list[int]  # steps done at each evaluation
    mean_ious: list[float] = field(default_factory=list)  # at each evaluation
    stages: dict[int, str] = field(default_factory=dict)  # the layers' scopes, from a step on
    losses: list[float] = field(default_factory=list)  # of the global batch at every step
    seconds: float = 0.0  # of all steps, without the evaluations
    synchronization_share: float = 0.0  # of these, waiting included; mean over the ranks
    exchanges_per_step: float = 0.0  # for batch normalization, forward and backward
    bytes_per_step: float = 0.0  # payload that a rank sends in them
    predictions: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of SHOWN_SCENES


def train(trainer: Trainer, held_out: Batch, group: dist.ProcessGroup) -> Training:
    """Takes all steps, together with the group's ranks, which have the rest of each global batch.

    All ranks estimate the running statistics of an evaluation, since those of the training differ
    by rank where the scope is narrower than the world; the group's rank 0 evaluates.
    """
    steps, global_batch = trainer.settings.steps, trainer.settings.global_batch
    leads, processes = dist.get_rank(group) == 0, dist.get_world_size(group)
    # Spread evenly, the last one after the last step.
    evaluated = sorted({math.ceil(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)})
    result = Training(trainer.scope, trainer.seed, processes, trainer.plan, evaluated)
    losses, spent = torch.zeros(steps), torch.zeros(4, dtype=torch.float64)
    bar = tqdm(
        range(steps),
        desc=f"{trainer.scope:>11}, seed {trainer.seed}",
        unit=" images",
        unit_scale=global_batch,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
        disable=not leads,
    )
    for step in bar:
        stage = " ".join(trainer.scopes_of_layers)
        if stage not in result.stages.values():
            result.stages[step] = stage
        before = _meters()
        losses[step] = trainer.step(step)
        spent += _meters() - before
        bar.set_postfix(loss=f"{losses[: step + 1][-RECENT_STEPS:].mean():.3f}", refresh=False)
        if step + 1 in evaluated:
            normscope.estimate_running_stats(trainer.network, trainer.batches_to_come(), group)
            if leads:
                result.mean_ious.append(trainer.evaluate(held_out))
            # Else the others' next step would have begun, and its time would count.
            dist.barrier(group)
    result.seconds, exchanges, payload, synchronizing = spent.tolist()
    result.exchanges_per_step, result.bytes_per_step = exchanges / steps, payload / steps
    means = torch.cat([losses, torch.tensor([synchronizing / result.seconds])])
    dist.all_reduce(means, group=group)
    *result.losses, result.synchronization_share = (means / processes).tolist()
    result.predictions = trainer.predict(held_out.images[:SHOWN_SCENES])
    return result


def _meters() -> torch.Tensor:
    """Seconds on the clock; exchanges, bytes and seconds of synchronization so far."""
    counters = normscope.communication_counters()
    return torch.tensor([time.perf_counter(), *counters], dtype=torch.float64)
