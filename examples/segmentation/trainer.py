# SPDX-License-Identifier: Apache-2.0
"""Trains the network under one scope from one seed, and measures the cost."""

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

# The background fills most of a scene; with this weight it does not dominate the other classes.
BACKGROUND_WEIGHT = 0.3

# For a one-cycle schedule (Smith and Topin 2019), with torch's other defaults.
LARGEST_LEARNING_RATE = 2e-2

# Global batches for estimating the running statistics before an evaluation, and for recommending
# scopes.
ESTIMATION_BATCHES = 16

# The share of the steps before the one at which scopes are recommended. Until then every layer has
# scope world.
STEPS_BEFORE_PLAN = 0.25

EVALUATIONS = 8

# The time of all evaluations of a training, in steps.
EVALUATION_STEPS = 80

# The progress bar shows the mean loss of this many steps; a single batch of a rank is mostly noise.
RECENT_STEPS = 50

# Held-out scenes whose predictions the report shows.
SHOWN_SCENES = 6


class Trainer:
    """Trains on one process's share of each global batch.

    Together, the processes train like a single process with the whole batch.

    Args:
        source: source of the scenes.
        settings: settings of the run.
        seed: seed of the initial weights and of the scenes.
        scope: scope of batch normalization, or progressive or recommended.
        share: indices in the global batch that this process trains on. The other ranks of the
            process group have the remaining indices, if there are any, in equal numbers.
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
            # Only the first of K slices updates the running statistics, like rank 0 of K ranks.
            layer.slice_stats = "first"
        self.plan: normscope.ScopePlan | None = None
        self._schedule: normscope.ProgressiveScope | None = None
        if scope == PROGRESSIVE:
            self._schedule = normscope.ProgressiveScope.doubling(self.network, settings.steps)
        else:
            normscope.set_scope(self.network, "world" if scope == RECOMMENDED else scope)
        # Each rank keeps its own running statistics: a broadcast would hide the effect of a scope.
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
        """Returns the distinct scopes for the next step."""
        return list(dict.fromkeys(str(layer.scope) for layer in self._layers))

    def batch(self, step: int) -> Batch:
        """Returns this process's share of the global batch of `step`."""
        return training_batch(self._source, self.seed, step, self._share)

    def batches_to_come(self) -> list[torch.Tensor]:
        """Returns this process's images of the steps that would follow the last one."""
        return [self.batch(self.settings.steps + i).images for i in range(ESTIMATION_BATCHES)]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the loss of a model, which may be a copy of the network, on a batch."""
        # A mean over pixels, not over weights: equal shares then have equal weight, and
        # DistributedDataParallel's average of gradients is that of the global batch.
        return functional.cross_entropy(
            model(batch.images),
            batch.masks,
            self._class_weights,
            ignore_index=VOID,
            reduction="none",
        ).mean()

    def choose_scopes(self, step: int) -> None:
        """Measures and applies the recommended scopes before the step that has been chosen."""
        if self.scope == RECOMMENDED and step == int(STEPS_BEFORE_PLAN * self.settings.steps):
            self.plan = normscope.recommend_scopes(self.network.train(), self.batches_to_come())
            self.plan.apply(self.network)

    def step(self, step: int) -> torch.Tensor:
        """Takes optimizer step number `step`.

        Returns:
            The loss of this share; the mean over all shares is the loss of the global batch.
        """
        loss = self.loss(self._model.train(), self.batch(step))
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
        """Computes the mean intersection over union on held-out scenes."""
        return mean_iou(self.predict(held_out.images), held_out.masks)


def mean_iou(predictions: torch.Tensor, masks: torch.Tensor) -> float:
    """Computes the mean of intersection over union over the classes; void pixels do not count.

    A class that is neither present nor predicted is left out.

    Example:
        >>> mean_iou(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]))
        0.5
    """
    known = masks != VOID
    of_classes = jaccard_score(masks[known], predictions[known], average=None)
    return float(torch.from_numpy(of_classes).mean())


@dataclass
class Training:
    """The results of one scope trained from one seed."""

    scope: str
    seed: int
    processes: int  # number of processes that shared the global batch
    evaluated_steps: list[int]  # number of steps before each evaluation
    plan: normscope.ScopePlan | None = None  # if scopes were recommended
    mean_ious: list[float] = field(default_factory=list)  # at each evaluation
    stages: dict[int, str] = field(default_factory=dict)  # scopes of the layers, by first step
    losses: list[float] = field(default_factory=list)  # of the global batch in each step
    seconds: float = 0.0  # for all steps and the choice of scopes, without the evaluations
    synchronization_share: float = 0.0  # of these seconds, with waiting; mean over the ranks
    exchanges_per_step: float = 0.0  # of batch normalization, forward and backward
    bytes_per_step: float = 0.0  # payload that a rank sends in these exchanges
    predictions: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # of SHOWN_SCENES


def train(trainer: Trainer, held_out: Batch, group: dist.ProcessGroup) -> Training:
    """Runs all steps together with the other ranks of the group.

    Before an evaluation, all ranks estimate the running statistics, because those of the training
    differ between ranks if the scope is narrower than the world. Rank 0 of the group evaluates.
    """
    steps, global_batch = trainer.settings.steps, trainer.settings.global_batch
    leads, processes = dist.get_rank(group) == 0, dist.get_world_size(group)
    # Evenly distributed; the last evaluation is after the last step.
    evaluated = sorted({math.ceil(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)})
    result = Training(trainer.scope, trainer.seed, processes, evaluated)
    losses, spent = torch.zeros(steps), torch.zeros(4, dtype=torch.float64)
    bar = tqdm(
        range(steps),
        desc=f"{trainer.scope:11} seed {trainer.seed}",
        unit=" images",
        unit_scale=global_batch,
        leave=False,
        disable=not leads or not sys.stderr.isatty(),
    )
    for step in bar:
        start = time.perf_counter()
        trainer.choose_scopes(step)
        spent[0] += time.perf_counter() - start
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
            # Otherwise the other ranks would start the next step, and their wait would be counted.
            dist.barrier(group)
    result.plan = trainer.plan
    result.seconds, exchanges, payload, synchronizing = spent.tolist()
    result.exchanges_per_step, result.bytes_per_step = exchanges / steps, payload / steps
    means = torch.cat([losses, torch.tensor([synchronizing / result.seconds])])
    dist.all_reduce(means, group=group)
    *result.losses, result.synchronization_share = (means / processes).tolist()
    result.predictions = trainer.predict(held_out.images[:SHOWN_SCENES])
    if leads:
        print(
            f"{trainer.scope:11} seed {trainer.seed}: mean IoU {result.mean_ious[-1]:.3f} after "
            f"{steps} steps in {result.seconds:.0f} s",
            flush=True,
        )
    return result


def _meters() -> torch.Tensor:
    """Returns the clock in seconds, and exchanges, bytes and seconds of synchronization so far."""
    counters = normscope.training.communication_counters()
    return torch.tensor([time.perf_counter(), *counters], dtype=torch.float64)
