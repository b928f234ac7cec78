# SPDX-License-Identifier: Apache-2.0
"""Trains the network under one scope; started by torchrun, once a rank."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

import normscope
from rank import Rank, joined, parse_arguments
from results import PREDICTIONS_FILE, RESULT_FILE, Quality, ScopeResult, Speed
from scenes import held_out_batch
from settings import Arrangement, Settings, arrange
from training import Trainer

EVALUATIONS = 8

# Steps that the progress bar's loss is a mean of; one rank's part of one batch is mostly noise.
RECENT_STEPS = 50

# Held-out scenes whose predictions the report shows.
SHOWN_SCENES = 6


class Course:
    """One rank's way through a training: steps, evaluations, and what they cost.

    Evaluations run on rank 0 with rank 0's running statistics, as a checkpoint that rank 0 writes
    would.
    """

    def __init__(self, settings: Settings, arrangement: Arrangement, rank: Rank) -> None:
        source = settings.source()
        share = rank.share(settings.global_batch)
        self._settings = settings
        self._arrangement = arrangement
        self._rank = rank
        self._trainer = Trainer(source, settings, arrangement.scope, share)
        self._held_out = held_out_batch(source)
        self._losses = torch.zeros(settings.steps)
        self._evaluated_steps: list[int] = []
        self._mean_ious: list[float] = []
        self._seconds = 0.0

    def run(self) -> ScopeResult:
        """Trains from the first to the last step."""
        due = evaluation_steps(self._settings.steps)
        before = normscope.communication_counters()
        with self._progress_bar() as bar:
            for step in range(self._settings.steps):
                self._take(step)
                bar.set_postfix(loss=f"{self._recent_loss(step):.3f}", refresh=False)
                bar.update(self._settings.global_batch)
                if step + 1 in due and self._rank.number == 0:
                    self._evaluated_steps.append(step + 1)
                    self._mean_ious.append(self._trainer.evaluate(self._held_out))
        after = normscope.communication_counters()
        return self._result(after.seconds - before.seconds, after.bytes - before.bytes)

    def shown_predictions(self) -> torch.Tensor:
        """Predicts the scenes that the report shows."""
        return self._trainer.predict(self._held_out.images[:SHOWN_SCENES])

    def _take(self, step: int) -> None:
        start = time.perf_counter()
        self._losses[step] = self._trainer.step(step)
        self._seconds += time.perf_counter() - start

    def _recent_loss(self, step: int) -> float:
        """Estimates the global batch's loss from this rank's part, over the last steps."""
        recent = self._losses[max(0, step + 1 - RECENT_STEPS) : step + 1]
        return float(recent.mean()) * self._rank.count

    def _progress_bar(self) -> tqdm[None]:
        images = self._settings.global_batch * self._settings.steps
        return tqdm(
            total=images,
            desc=f"{self._arrangement.scope:>9}",
            unit=" images",
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
            disable=self._rank.number != 0,
        )

    def _result(self, synchronization_seconds: float, synchronization_bytes: int) -> ScopeResult:
        dist.all_reduce(self._losses)
        share = torch.tensor(synchronization_seconds / self._seconds)
        dist.all_reduce(share)
        steps = self._settings.steps
        return ScopeResult(
            self._arrangement,
            Quality(self._losses.tolist(), self._evaluated_steps, self._mean_ious),
            Speed(
                images_per_second=steps * self._settings.global_batch / self._seconds,
                synchronization_share=float(share) / self._rank.count,
                bytes_per_step=synchronization_bytes / steps,
            ),
        )


def evaluation_steps(steps: int) -> set[int]:
    """Spreads the evaluations evenly, the last one after the last step.

    Example:
        >>> sorted(evaluation_steps(80))
        [10, 20, 30, 40, 50, 60, 70, 80]
    """
    return {-(-steps * i // EVALUATIONS) for i in range(1, EVALUATIONS + 1)}


def _save(course: Course, result: ScopeResult, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder / RESULT_FILE)
    np.save(folder / PREDICTIONS_FILE, course.shown_predictions().numpy())


@record
def main() -> None:
    """Trains; rank 0 writes what came out."""
    settings, scope, output = parse_arguments(__doc__)
    arrangement = arrange(scope, settings.ranks, settings.images_per_rank)
    with joined() as rank:
        course = Course(settings, arrangement, rank)
        result = course.run()
        if rank.number == 0:
            _save(course, result, output / arrangement.name)


if __name__ == "__main__":
    main()
