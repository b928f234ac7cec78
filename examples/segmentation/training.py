# SPDX-License-Identifier: Apache-2.0
"""One process' part in training a segmentation network."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import normscope
from metric import confusion, mean_iou
from network import SegmentationNetwork
from scenes import VOID, Batch, SceneSource, training_batch
from settings import PROGRESSIVE, Settings

# Background fills most of a scene; with this weight it does not drown the other classes.
BACKGROUND_WEIGHT = 0.15

LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-4
DECAY_POWER = 0.9

# Held-out scenes that go through the network at a time; memory only, results do not depend on it.
EVALUATION_BATCH = 32

# Global batches that the running statistics are estimated from before an evaluation.
ESTIMATION_BATCHES = 16


class Trainer:
    """Trains on its share of each global batch; together the shares train as one process would.

    The loss is the weighted sum over this share's pixels, divided by the weight of the whole
    global batch. The number of processes therefore changes nothing but whose statistics
    normalize what.

    Args:
        source: where scenes come from.
        settings: of the run.
        seed: of the first weights and of the scenes.
        scope: of the batch normalization, or progressive.
        share: indices in the global batch that this process trains on. If that is not all of it,
            the process group's ranks hold the others.
        dtype: of parameters and images.
    """

    def __init__(
        self,
        source: SceneSource,
        settings: Settings,
        seed: int,
        scope: str,
        share: range,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._source = source
        self._settings = settings
        self._seed = seed
        self._share = share
        self._dtype = dtype
        self._class_count = len(source.class_names)
        self._class_weights = torch.ones(self._class_count, dtype=dtype, device=settings.device)
        self._class_weights[0] = BACKGROUND_WEIGHT
        self.network = _network(self._class_count, settings, seed, dtype)
        self._scopes = _scopes(self.network, scope, settings.steps)
        self._replicas = 1 if len(share) == settings.global_batch else dist.get_world_size()
        # Each rank keeps its own running statistics: a broadcast would hide what a scope does.
        self._model: nn.Module = (
            self.network
            if self._replicas == 1
            else DistributedDataParallel(self.network, forward_sync_buffers=False)
        )
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY
        )
        self._learning_rates = torch.optim.lr_scheduler.PolynomialLR(
            self._optimizer, settings.steps, DECAY_POWER
        )

    @property
    def scope(self) -> str:
        """The scope that the next step trains with."""
        return str(self._scopes.scope)

    def step(self, step: int) -> torch.Tensor:
        """Takes optimizer step number `step`.

        Returns:
            This share's part of the global batch's loss; the parts of all shares add up to it.
        """
        images, masks = self._batch(step)
        self._model.train()
        weight = self._start_weighing(masks)
        loss = functional.cross_entropy(
            self._model(images), masks, self._class_weights, ignore_index=VOID, reduction="sum"
        )
        loss = loss / weight.wait()
        self._optimizer.zero_grad()
        # DistributedDataParallel averages gradients where parts of one sum must be added.
        torch.autograd.backward(loss * self._replicas)
        self._optimizer.step()
        self._learning_rates.step()
        self._scopes.step()
        return loss.detach()

    def estimate_running_stats(self) -> None:
        """Computes the running statistics that every rank then has; all ranks take part.

        Those of the training differ by rank where the scope is narrower than the world, and would
        judge a scope by what its rank 0 happened to see. The scenes are those that would be trained
        on next.
        """
        steps = self._settings.steps
        batches = [self._batch(step)[0] for step in range(steps, steps + ESTIMATION_BATCHES)]
        normscope.estimate_running_stats(self.network, batches)

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        """Predicts classes [n, side, side] with the running statistics as they are."""
        self.network.eval()
        with torch.no_grad():
            return torch.cat(
                [
                    self.network(part.to(self._settings.device, self._dtype)).argmax(1).cpu()
                    for part in torch.split(images, EVALUATION_BATCH)
                ]
            )

    def evaluate(self, held_out: Batch) -> float:
        """Mean intersection over union on scenes that were not trained on."""
        predictions = self.predict(held_out.images)
        return mean_iou(confusion(predictions, held_out.masks, self._class_count))

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This share's images and masks of global batch number `step`."""
        batch = training_batch(self._source, self._seed, step, self._share)
        device = self._settings.device
        return batch.images.to(device, self._dtype), batch.masks.to(device)

    def _start_weighing(self, masks: torch.Tensor) -> _GlobalWeight:
        counts = torch.bincount(masks[masks != VOID], minlength=self._class_count)
        return _GlobalWeight(counts, self._class_weights, self._replicas)


class _GlobalWeight:
    """Weight of the global batch's pixels, on its way while the forward pass runs.

    Integers travel, so that the weight is the same to the bit for any split over ranks.
    """

    def __init__(self, counts: torch.Tensor, class_weights: torch.Tensor, replicas: int) -> None:
        self._counts = counts
        self._class_weights = class_weights
        self._work = dist.all_reduce(counts, async_op=True) if replicas > 1 else None

    def wait(self) -> torch.Tensor:
        """Returns the weight; at least one pixel's, so that a batch of void has loss 0."""
        if self._work is not None:
            self._work.wait()
        return (self._counts * self._class_weights).sum().clamp_min(BACKGROUND_WEIGHT)


def _network(
    class_count: int, settings: Settings, seed: int, dtype: torch.dtype
) -> SegmentationNetwork:
    """Makes the network that every process starts from."""
    torch.manual_seed(seed)
    network = SegmentationNetwork(class_count).to(settings.device, dtype)
    normscope.convert(network)
    for layer in network.modules():
        if isinstance(layer, normscope.BatchNorm2d):
            # Of K slices only the first updates the running statistics, as rank 0's do of K ranks.
            layer.slice_stats = "first"
    return network


def _scopes(network: SegmentationNetwork, scope: str, steps: int) -> normscope.ProgressiveScope:
    """Gives the layers their scope, and says when it changes."""
    if scope == PROGRESSIVE:
        return normscope.ProgressiveScope.doubling(network, steps)
    return normscope.ProgressiveScope(network, [scope], [0])
