# SPDX-License-Identifier: Apache-2.0
"""One process' part in training the network."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import normscope
from network import SegmentationNetwork
from scenes import VOID, Batch, SceneSource, training_batch
from settings import PROGRESSIVE, RECOMMENDED, Settings

# Background fills most of a scene; with this weight it does not drown the other classes.
BACKGROUND_WEIGHT = 0.3

# Of a one-cycle schedule (Smith and Topin 2019).
LARGEST_LEARNING_RATE = 2e-2
WARM_UP = 0.3  # of the steps
WEIGHT_DECAY = 1e-2

# Held-out scenes that go through the network at a time; memory only, results do not depend on it.
EVALUATION_BATCH = 32

# Global batches that running statistics are estimated from before an evaluation, and scopes
# recommended from before the training.
ESTIMATION_BATCHES = 16


class Trainer:
    """Trains on its share of each global batch; together the shares train as one process would.

    Args:
        source: where scenes come from.
        settings: of the run.
        seed: of the first weights and of the scenes.
        scope: of the batch normalization, or progressive.
        share: indices in the global batch that this process trains on. If that is not all of it,
            the process group's ranks hold the others, as many each.
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
        self._source, self._settings, self._seed = source, settings, seed
        self._share, self._dtype = share, dtype
        self._class_count = len(source.class_names)
        self._class_weights = torch.ones(self._class_count, dtype=dtype)
        self._class_weights[0] = BACKGROUND_WEIGHT
        torch.manual_seed(seed)
        self.network = SegmentationNetwork(self._class_count).to(dtype)
        self._layers = _convert(self.network)
        self._scopes = _schedule(self.network, scope, settings.steps)
        self.plan: normscope.ScopePlan | None = None
        if scope == RECOMMENDED:
            self.plan = normscope.recommend_scopes(self.network, self._batches_to_come())
            self.plan.apply(self.network)
        # Each rank keeps its own running statistics: a broadcast would hide what a scope does.
        self._model: nn.Module = (
            self.network
            if len(share) == settings.global_batch
            else DistributedDataParallel(self.network, forward_sync_buffers=False)
        )
        self._optimizer = torch.optim.AdamW(self.network.parameters(), weight_decay=WEIGHT_DECAY)
        self._learning_rates = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer,
            LARGEST_LEARNING_RATE,
            settings.steps,
            pct_start=WARM_UP,
            cycle_momentum=False,
        )

    @property
    def scope(self) -> str:
        """The scope that the next step trains with, or recommended."""
        return RECOMMENDED if self.plan else str(self._scopes.scope)

    @property
    def norm_batch_sizes(self) -> str:
        """Images that one set of statistics is then computed over, from layer to layer."""
        sizes = {self._settings.norm_batch_size(str(layer.scope)) for layer in self._layers}
        return " to ".join(map(str, sorted({min(sizes), max(sizes)})))

    def step(self, step: int) -> torch.Tensor:
        """Takes optimizer step number `step`.

        Returns:
            This share's loss; the mean over all shares is the global batch's.
        """
        batch = self.batch(step)
        self._model.train()
        # A mean over pixels, not over their weights: equal shares then have equal weight, and the
        # gradients that DistributedDataParallel averages are those of the global batch.
        loss = functional.cross_entropy(
            self._model(batch.images),
            batch.masks,
            self._class_weights,
            ignore_index=VOID,
            reduction="none",
        ).mean()
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._learning_rates.step()
        self._scopes.step()
        return loss.detach()

    def estimate_running_stats(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """Computes the running statistics that every rank of the group then has.

        Those of the training differ by rank where the scope is narrower than the world, and would
        judge a scope by what its rank 0 happened to see.
        """
        normscope.estimate_running_stats(self.network, self._batches_to_come(), group)

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        """Predicts classes [n, side, side] with the running statistics as they are."""
        self.network.eval()
        with torch.no_grad():
            parts = [self.network(part).argmax(1) for part in images.split(EVALUATION_BATCH)]
        return torch.cat(parts)

    def evaluate(self, held_out: Batch) -> float:
        """Mean intersection over union on scenes that were not trained on."""
        return mean_iou(self.predict(held_out.images), held_out.masks, self._class_count)

    def _batches_to_come(self) -> list[torch.Tensor]:
        """This share's images that would be trained on after the last step."""
        steps = self._settings.steps
        return [self.batch(step).images for step in range(steps, steps + ESTIMATION_BATCHES)]

    def batch(self, step: int) -> Batch:
        """This share of global batch number `step`."""
        batch = training_batch(self._source, self._seed, step, self._share)
        return Batch(batch.images.to(self._dtype), batch.masks)


def mean_iou(predictions: torch.Tensor, masks: torch.Tensor, class_count: int) -> float:
    """Mean over the classes of intersection over union; void pixels do not count.

    A class that is neither there nor predicted says nothing, and is left out.

    Example:
        >>> mean_iou(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), class_count=2)
        0.5
    """
    known = masks != VOID
    pairs = masks[known] * class_count + predictions[known]
    counts = torch.bincount(pairs, minlength=class_count**2).view(class_count, class_count)
    intersection = counts.diagonal().double()
    union = counts.sum(0) + counts.sum(1) - intersection
    seen = union > 0
    return float((intersection[seen] / union[seen]).mean())


def _convert(network: nn.Module) -> list[normscope.BatchNorm]:
    """Gives the network layers of normscope; returns them."""
    normscope.convert(network)
    layers = [layer for layer in network.modules() if isinstance(layer, normscope.BatchNorm)]
    for layer in layers:
        # Of K slices only the first updates the running statistics, as rank 0's do of K ranks.
        layer.slice_stats = "first"
    return layers


def _schedule(network: nn.Module, scope: str, steps: int) -> normscope.ProgressiveScope:
    """Gives the layers their scope, and says when it changes."""
    if scope == PROGRESSIVE:
        return normscope.ProgressiveScope.doubling(network, steps)
    return normscope.ProgressiveScope(network, ["world" if scope == RECOMMENDED else scope], [0])
