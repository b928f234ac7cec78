# SPDX-License-Identifier: Apache-2.0
"""Trains networks under recommended scopes, and prints what wanted numbers are worth.

One process stands for four ranks of two images: slices of its batch are the ranks, so that local is
slices:4, group:2 is slices:2, and world is local. The plan of
normscope.recommend_scopes is made from the first weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import normscope

sys.path.append(str(Path(__file__).parents[1] / "examples" / "segmentation"))

RANKS = 4
IMAGES_PER_RANK = 2
BATCH = RANKS * IMAGES_PER_RANK
BATCHES_OF_A_PLAN = 16
PLAN_EVERY = 100

# What a scope of four ranks is in one process with the batch of all of them.
IN_ONE_PROCESS = {"local": "slices:4", "group:2": "slices:2", "world": "local"}


class Task:
    """A network to train, and its data.

    Args:
        steps: Of the optimizer.
    """

    steps: int
    model: nn.Module

    def images(self, step: int) -> torch.Tensor:
        """Those of a training step, or of one that would follow the last."""
        raise NotImplementedError

    def step(self, step: int) -> None:
        """Take a step of the optimizer."""
        raise NotImplementedError

    def quality(self) -> float:
        """On held-out data, with running statistics as they are."""
        raise NotImplementedError


class Segmentation(Task):
    """The demo's network."""

    def __init__(self, seed: int) -> None:
        from scenes import Batch
        from settings import Settings
        from trainer import Trainer

        settings = Settings(RANKS, IMAGES_PER_RANK)
        source = settings.source()
        self.steps = settings.steps
        self._held_out = Batch.of(source.held_out_scenes())
        self._trainer = Trainer(source, settings, seed, "local", range(BATCH))
        self.model = self._trainer.network

    def images(self, step: int) -> torch.Tensor:
        """Scenes."""
        return self._trainer.batch(step).images

    def step(self, step: int) -> None:
        """As the demo does."""
        self._trainer.step(step)

    def quality(self) -> float:
        """Mean IoU."""
        return self._trainer.evaluate(self._held_out)


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al. 2016), over two dimensions or one."""

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
        """Of the size of x divided by the stride."""
        return functional.relu(self.residual(x) + self.shortcut(x))


def _kinds(dims: int) -> tuple[Callable[..., nn.Module], Callable[[int], nn.Module]]:
    return (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv1d, nn.BatchNorm1d)


def residual_network(dims: int) -> nn.Module:
    """Four blocks, of which each but the first halves the size; a head with a layer of its own."""
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


class Digits(Task):
    """Handwritten digits as pictures [1, 8, 8], or as sequences [1, 64] of their rows."""

    steps = 1000

    def __init__(self, seed: int, dims: int) -> None:
        digits = load_digits()
        shape = (-1, 1, 8, 8) if dims == 2 else (-1, 1, 64)
        images = torch.from_numpy((digits.images / 8 - 1).astype(np.float32)).reshape(shape)
        targets = torch.from_numpy(digits.target)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(targets)))
        self._training = images[order[:1400]], targets[order[:1400]]
        self._held_out = images[order[1400:]], targets[order[1400:]]
        self._seed = seed
        torch.manual_seed(seed)
        self.model = normscope.convert(residual_network(dims), "local")
        for layer in self.model.modules():
            if isinstance(layer, normscope.BatchNorm):
                layer.slice_stats = "first"
        self._optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=1e-2)
        self._rates = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, 1e-2, self.steps)

    def images(self, step: int) -> torch.Tensor:
        """Some of the digits."""
        return self._training[0][self._chosen(step)]

    def step(self, step: int) -> None:
        """Of cross entropy."""
        self.model.train()
        targets = self._training[1][self._chosen(step)]
        loss = functional.cross_entropy(self.model(self.images(step)), targets)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._rates.step()

    def quality(self) -> float:
        """Accuracy."""
        self.model.eval()
        with torch.no_grad():
            predicted = self.model(self._held_out[0]).argmax(1)
        return float((predicted == self._held_out[1]).double().mean())

    def _chosen(self, step: int) -> torch.Tensor:
        rng = np.random.default_rng((self._seed, step))
        return torch.from_numpy(rng.integers(1400, size=BATCH))


TASKS: dict[str, Callable[[int], Task]] = {
    "segmentation": Segmentation,
    "digits": lambda seed: Digits(seed, dims=2),
    "sequences": lambda seed: Digits(seed, dims=1),
}


@dataclass(frozen=True)
class Result:
    """What a training came to, and what share of world's exchanges and bytes it would send."""

    task: str
    scopes: str
    seed: int
    quality: float
    exchanges: float
    bytes: float
    wide_layers: dict[str, str]  # in the end


def train(task_name: str, scopes: str, seed: int) -> Result:
    """Train under local, world, progressive, or the plan for a wanted number.

    A number with a star is measured again every PLAN_EVERY steps, as normscope.AdaptiveScope does
    on ranks.
    """
    task = TASKS[task_name](seed)
    batches = [task.images(task.steps + i) for i in range(BATCHES_OF_A_PLAN)]
    world = normscope.recommend_scopes(task.model, batches, float("inf"), ranks=RANKS)
    all_layers = {plan.layer: plan.exchange_bytes for plan in world.layers}
    schedule = _schedule(task.model, scopes, task.steps, batches, all_layers)
    exchanges = sent = 0
    for step in range(task.steps):
        if step in schedule:
            chosen = schedule[step]()
            wide = {layer: scope for layer, scope in chosen.items() if scope != "local"}
            _apply(task.model, chosen)
        task.step(step)
        exchanges += len(wide)
        sent += sum(all_layers[layer] for layer in wide)
    normscope.estimate_running_stats(task.model, batches)
    return Result(
        task_name,
        scopes,
        seed,
        task.quality(),
        exchanges / (task.steps * len(all_layers)),
        sent / (task.steps * sum(all_layers.values())),
        wide,
    )


def _schedule(
    model: nn.Module,
    scopes: str,
    steps: int,
    batches: list[torch.Tensor],
    layers: Iterable[str],
) -> dict[int, Callable[[], dict[str, str]]]:
    """What chooses the scope of each layer, by the step before which it does."""
    if scopes in ("local", "world"):
        return {0: partial(_everywhere, layers, scopes)}
    if scopes == "progressive":
        return {
            i * steps // len(IN_ONE_PROCESS): partial(_everywhere, layers, scope)
            for i, scope in enumerate(IN_ONE_PROCESS)
        }
    wanted = float(scopes.rstrip("*"))

    def plan() -> dict[str, str]:
        plan = normscope.recommend_scopes(model, batches, wanted, ranks=RANKS)
        return {layer: str(scope) for layer, scope in plan.scopes.items()}

    return dict.fromkeys(range(0, steps, PLAN_EVERY) if "*" in scopes else [0], plan)


def _everywhere(layers: Iterable[str], scope: str) -> dict[str, str]:
    return dict.fromkeys(layers, scope)


def _apply(model: nn.Module, scopes: dict[str, str]) -> None:
    layers = dict(model.named_modules())
    for name, scope in scopes.items():
        layer = layers[name]
        assert isinstance(layer, normscope.BatchNorm)
        layer.scope = normscope.Scope(IN_ONE_PROCESS[scope])


def table(results: list[Result]) -> str:
    """Quality as a ratio to that of world from the same seeds."""
    lines = [f"{'':14}{'scopes':>8}{'quality':>16}{'of world':>10}{'exchanges':>11}{'bytes':>8}"]
    for task, scopes in dict.fromkeys((one.task, one.scopes) for one in results):
        chosen = [one for one in results if (one.task, one.scopes) == (task, scopes)]
        world = {
            one.seed: one.quality for one in results if (one.task, one.scopes) == (task, "world")
        }
        ratios = [one.quality / world[one.seed] for one in chosen if one.seed in world]
        quality = [one.quality for one in chosen]
        spread = statistics.stdev(quality) if len(quality) > 1 else 0.0
        lines.append(
            f"{task:14}{scopes:>8}{statistics.fmean(quality):9.3f} ± {spread:.3f}"
            f"{statistics.fmean(ratios) if ratios else float('nan'):10.2f}"
            f"{statistics.fmean(one.exchanges for one in chosen):11.0%}"
            f"{statistics.fmean(one.bytes for one in chosen):8.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    """Train every task under every choice of scopes from every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--scopes", nargs="+", default=["world", "local", "progressive", "4", "4*", "8", "16"]
    )
    parser.add_argument("--seeds", nargs=2, type=int, default=[0, 5], metavar=("FIRST", "END"))
    parser.add_argument("--json", type=Path, help="also write every training to FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for task in given.tasks:
        for seed in range(*given.seeds):
            for scopes in given.scopes:
                results.append(train(task, scopes, seed))
                print(json.dumps(asdict(results[-1])), flush=True)
    print(table(results))
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


if __name__ == "__main__":
    main()
