# SPDX-License-Identifier: Apache-2.0
"""Networks to train under scopes, and their data.

A process trains on the whole batch of a step, or on a rank's share of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import normscope

sys.path.append(str(Path(__file__).parents[1] / "examples" / "segmentation"))

RANKS = 4
IMAGES_PER_RANK = 2
BATCH = RANKS * IMAGES_PER_RANK


class Segmentation:
    """The demo's network."""

    def __init__(self, seed: int, share: range, steps: int) -> None:
        from scenes import Batch
        from settings import Settings
        from trainer import Trainer

        settings = Settings(RANKS, IMAGES_PER_RANK, steps)
        source = settings.source()
        self.steps = steps
        self._held_out = Batch.of(source.held_out_scenes())
        # In a single process with the whole batch, local stands for world.
        self._trainer = Trainer(source, settings, seed, "local", share)
        self.model = self._trainer.network

    def images(self, step: int) -> torch.Tensor:
        """Return the scenes of a step, which may be one after the last."""
        return self._trainer.batch(step).images

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of a model, which may be a copy, on the scenes of a step."""
        return self._trainer.loss(model, self._trainer.batch(step))

    def step(self, step: int) -> None:
        """Run a step of the demo."""
        self._trainer.step(step)

    def quality(self) -> float:
        """Return the mean IoU on held-out scenes, with the current running statistics."""
        return self._trainer.evaluate(self._held_out)


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al. 2016), in one or two dimensions."""

    def __init__(self, inputs: int, outputs: int, stride: int, dims: int) -> None:
        super().__init__()
        convolution, norm = _kinds(dims)
        self.residual = nn.Sequential(
            convolution(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            norm(outputs),
            nn.ReLU(),
            convolution(outputs, outputs, 3, padding=1, bias=False),
            norm(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(
                convolution(inputs, outputs, 1, stride=stride, bias=False), norm(outputs)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block; the size is divided by the stride."""
        return functional.relu(self.residual(x) + self.shortcut(x))


def _kinds(dims: int) -> tuple[Callable[..., nn.Module], Callable[[int], nn.Module]]:
    return (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv1d, nn.BatchNorm1d)


def residual_network(dims: int) -> nn.Module:
    """Return four blocks, all but the first of which halve the size, and a normalized head."""
    convolution, norm = _kinds(dims)
    return nn.Sequential(
        convolution(1, 16, 3, padding=1, bias=False),
        norm(16),
        nn.ReLU(),
        *(
            Block(inputs, outputs, stride, dims)
            for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 32, 2), (32, 64, 2))
        ),
        nn.AdaptiveAvgPool2d(1) if dims == 2 else nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(64, 32, bias=False),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class Digits:
    """Handwritten digits as pictures [1, 8, 8], or as sequences [1, 64] of their rows."""

    def __init__(self, dims: int, seed: int, share: range, steps: int) -> None:
        digits = load_digits()
        shape = (-1, 1, 8, 8) if dims == 2 else (-1, 1, 64)
        images = torch.from_numpy((digits.images / 8 - 1).astype(np.float32)).reshape(shape)
        targets = torch.from_numpy(digits.target)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(targets)))
        self.steps = steps
        self._training = images[order[:1400]], targets[order[:1400]]
        self._held_out = images[order[1400:]], targets[order[1400:]]
        self._seed, self._share = seed, share
        torch.manual_seed(seed)
        self.model = normscope.convert(residual_network(dims), "local")
        for layer in self.model.modules():
            if isinstance(layer, normscope.BatchNorm):
                layer.slice_stats = "first"
        self._trained: nn.Module = (
            self.model
            if len(share) == BATCH
            else DistributedDataParallel(self.model, forward_sync_buffers=False)
        )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=1e-2)
        self._rates = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, 1e-2, steps)

    def images(self, step: int) -> torch.Tensor:
        """Return the digits of a step, which may be one after the last."""
        return self._training[0][self._chosen(step)]

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the cross entropy of a model, which may be a copy, on the digits of a step."""
        targets = self._training[1][self._chosen(step)]
        return functional.cross_entropy(model(self.images(step)), targets)

    def step(self, step: int) -> None:
        """Run a step of AdamW."""
        self._trained.train()
        loss = self.loss(self._trained, step)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._rates.step()

    def quality(self) -> float:
        """Return the accuracy on held-out digits, with the current running statistics."""
        self.model.eval()
        with torch.no_grad():
            predicted = self.model(self._held_out[0]).argmax(1)
        return float((predicted == self._held_out[1]).double().mean())

    def _chosen(self, step: int) -> torch.Tensor:
        rng = np.random.default_rng((self._seed, step))
        chosen = rng.integers(1400, size=BATCH)
        return torch.from_numpy(chosen[self._share.start : self._share.stop])


# A network to train, and its data.
Task = Segmentation | Digits

STEPS = {"segmentation": 700, "digits": 1000, "sequences": 1000}


def make_task(name: str, seed: int, share: range = range(BATCH)) -> Task:
    """Make a task by its name in STEPS.

    Args:
        name: The name of the network.
        seed: The seed of the initial weights and of the order of the data.
        share: Indices in each batch that this process trains on. If these are not all, the other
            ranks of the default process group have the rest.
    """
    if name == "segmentation":
        return Segmentation(seed, share, STEPS[name])
    return Digits(2 if name == "digits" else 1, seed, share, STEPS[name])
