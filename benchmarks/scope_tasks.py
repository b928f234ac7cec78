# SPDX-License-Identifier: Apache-2.0
"""Networks to train under scopes, and their data.

A process trains on the whole batch of a step, or on a rank's share of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import normscope
from land import VOID, Land, mean_iou
from land_networks import FeaturePyramid, PyramidNetwork, UNet

sys.path.append(str(Path(__file__).parents[1] / "examples" / "segmentation"))

_SPELLING = re.compile(r"(?P<name>[\w-]+)(@(?P<ranks>\d+)x(?P<images>\d+))?")


@dataclass(frozen=True)
class Setting:
    """What is trained, and on how many ranks.

    Args:
        name: One of STEPS.
        ranks: The number of ranks, which one process may stand for.
        images: The number of images of a rank in a step.
    """

    name: str
    ranks: int = 4
    images: int = 2

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read ``NAME`` or ``NAME@RANKSxIMAGES``.

        Raises:
            ValueError: If there is no such task.
        """
        spelling = _SPELLING.fullmatch(text)
        if spelling is None or spelling["name"] not in STEPS:
            raise ValueError(
                f"tasks: expected NAME or NAME@RANKSxIMAGES with one of {', '.join(STEPS)}, got "
                f"{text!r}"
            )
        if spelling["ranks"] is None:
            return cls(spelling["name"])
        return cls(spelling["name"], int(spelling["ranks"]), int(spelling["images"]))

    def __str__(self) -> str:
        """Return the text that ``parse`` reads."""
        return f"{self.name}@{self.ranks}x{self.images}"

    @property
    def batch(self) -> int:
        """The number of images in a step."""
        return self.ranks * self.images


class Task:
    """A network with its data and its optimizer.

    Args:
        setting: What is trained.
        share: Indices in each batch that this process trains on. If these are not all, the other
            ranks of the default process group have the rest.
        network: The network, with layers of torch.nn.
        change: Applied to the network instead of normscope's conversion; None for that.
    """

    data: Data

    def __init__(
        self,
        setting: Setting,
        seed: int,
        share: range | None = None,
        change: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        self.setting, self.seed, self.steps = setting, seed, STEPS[setting.name]
        self.data = _DATA[setting.name]()
        self._share = range(setting.batch) if share is None else share
        torch.manual_seed(seed)
        network = self.data.network()
        self.model = normscope.convert(network, "local") if change is None else change(network)
        for layer in self.model.modules():
            if isinstance(layer, normscope.BatchNorm):
                layer.slice_stats = "first"  # as rank 0 of several ranks
        self._trained: nn.Module = (
            self.model
            if len(self._share) == setting.batch
            else DistributedDataParallel(self.model, broadcast_buffers=False)
        )
        self._optimizer, self._rates = self.data.optimizer(self.model, self.steps)

    def images(self, step: int) -> torch.Tensor:
        """Return the images of a step, which may be one after the last."""
        return self._batch(step)[0]

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of a model, which may be a copy, on the images of a step."""
        images, targets = self._batch(step)
        return self.data.loss(model(images), targets)

    def step(self, step: int) -> None:
        """Run a step of the optimizer."""
        loss = self.loss(self._trained.train(), step)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._rates.step()

    def quality(self) -> float:
        """Return the mean IoU or accuracy on held-out data, with the current running statistics."""
        images, targets = self.data.held_out()
        self.model.eval()
        with torch.no_grad():
            predicted = torch.cat([self.model(part).argmax(1) for part in images.split(64)])
        return self.data.quality(predicted, targets)

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.data.batch(self.seed, step, self.setting.batch, self._share)


Optimizer = tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


class Data:
    """Images and targets, with the network, loss and optimizer for them."""

    def network(self) -> nn.Module:
        """Make the network from plain layers."""
        raise NotImplementedError

    def batch(
        self, seed: int, step: int, size: int, share: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a share of the images and targets of a step."""
        raise NotImplementedError

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images and targets to evaluate."""
        raise NotImplementedError

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss; a mean over equal shares is that of the whole."""
        raise NotImplementedError

    def quality(self, predicted: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the mean IoU or accuracy."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module, steps: int) -> Optimizer:
        """Return AdamW and a one-cycle schedule (Smith and Topin 2019)."""
        raise NotImplementedError


def _one_cycle(model: nn.Module, steps: int, rate: float, *, cycle: bool = False) -> Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, cycle_momentum=cycle)
    return optimizer, rates


class LandCover(Data):
    """Satellite images, segmented by one of several networks."""

    def __init__(self, network: Callable[[int], nn.Module], classes: str = "ten") -> None:
        self._land, self._network = Land(classes), network
        self._weights = self._land.class_weights()

    def network(self) -> nn.Module:
        """Make the network."""
        return self._network(self._land.class_count)

    def batch(
        self, seed: int, step: int, size: int, share: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a share of the tiles."""
        images, labels = self._land.batch(seed, step, size)
        part = slice(share.start, share.stop)
        return images[part], labels[part]

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tiles of held-out blocks."""
        return self._land.held_out()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the weighted cross entropy, averaged over pixels."""
        return functional.cross_entropy(
            outputs, targets, self._weights, ignore_index=VOID, reduction="none"
        ).mean()

    def quality(self, predicted: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the mean IoU."""
        return mean_iou(predicted, targets, self._land.class_count)

    def optimizer(self, model: nn.Module, steps: int) -> Optimizer:
        """Return AdamW with its schedule."""
        return _one_cycle(model, steps, 4e-3)


class Scenes(Data):
    """The scenes of the demo: digits on photographs."""

    def __init__(self) -> None:
        from scenes import Batch, DigitScenes

        self._source = DigitScenes()
        self._held_out = Batch.of(self._source.held_out_scenes())
        self._weights = torch.ones(len(self._source.class_names))
        self._weights[0] = 0.3  # as trainer.py weighs the background

    def network(self) -> nn.Module:
        """Make the demo's network."""
        return demo_network(len(self._source.class_names))

    def batch(
        self, seed: int, step: int, size: int, share: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a share of the scenes."""
        from scenes import training_batch

        images, masks = training_batch(self._source, seed, step, share)
        return images, masks

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the held-out scenes."""
        return self._held_out.images, self._held_out.masks

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the weighted cross entropy, averaged over pixels."""
        return functional.cross_entropy(outputs, targets, self._weights, reduction="none").mean()

    def quality(self, predicted: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the mean IoU."""
        return mean_iou(predicted, targets, len(self._weights))

    def optimizer(self, model: nn.Module, steps: int) -> Optimizer:
        """Return AdamW with its schedule."""
        return _one_cycle(model, steps, 2e-2)


def demo_network(classes: int) -> nn.Module:
    """Return the network of examples/segmentation."""
    from network import SegmentationNetwork

    return SegmentationNetwork(classes)


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


class Digits(Data):
    """Handwritten digits as pictures [1, 8, 8], or as sequences [1, 64] of their rows."""

    def __init__(self, dims: int) -> None:
        digits = load_digits()
        shape = (-1, 1, 8, 8) if dims == 2 else (-1, 1, 64)
        images = torch.from_numpy((digits.images / 8 - 1).astype(np.float32)).reshape(shape)
        targets = torch.from_numpy(digits.target)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(targets)))
        self._dims = dims
        self._training = images[order[:1400]], targets[order[:1400]]
        self._held_out = images[order[1400:]], targets[order[1400:]]

    def network(self) -> nn.Module:
        """Make the residual network."""
        return residual_network(self._dims)

    def batch(
        self, seed: int, step: int, size: int, share: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a share of the digits."""
        chosen = np.random.default_rng((seed, step)).integers(1400, size=size)
        part = torch.from_numpy(chosen[share.start : share.stop])
        return self._training[0][part], self._training[1][part]

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the held-out digits."""
        return self._held_out

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy."""
        return functional.cross_entropy(outputs, targets)

    def quality(self, predicted: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the accuracy."""
        return float((predicted == targets).double().mean())

    def optimizer(self, model: nn.Module, steps: int) -> Optimizer:
        """Return AdamW with its schedule."""
        return _one_cycle(model, steps, 1e-2, cycle=True)


STEPS = {
    "land-pyramid": 400,
    "land-unet": 400,
    "land-demo": 400,
    "land-features": 400,
    "six-pyramid": 400,
    "six-unet": 400,
    "six-demo": 400,
    "scenes": 700,
    "digits": 1000,
    "sequences": 1000,
}

_DATA: dict[str, Callable[[], Data]] = {
    "land-pyramid": lambda: LandCover(PyramidNetwork),
    "land-unet": lambda: LandCover(UNet),
    "land-demo": lambda: LandCover(demo_network),
    "land-features": lambda: LandCover(FeaturePyramid),
    "six-pyramid": lambda: LandCover(PyramidNetwork, "six"),
    "six-unet": lambda: LandCover(UNet, "six"),
    "six-demo": lambda: LandCover(demo_network, "six"),
    "scenes": Scenes,
    "digits": lambda: Digits(2),
    "sequences": lambda: Digits(1),
}
