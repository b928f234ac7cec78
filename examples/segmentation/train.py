# SPDX-License-Identifier: Apache-2.0
"""Trains the network under one scope after the other; started by torchrun, once a rank."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

import normscope
from rank import Rank, parse_arguments, run_as_rank
from results import (
    PREDICTIONS_FILE,
    RESULT_FILE,
    Quality,
    Speed,
    Stage,
    Training,
    training_folder,
)
from scenes import SceneSource, held_out_batch
from settings import Arrangement, Settings, arrange, norm_batch_size
from training import Trainer

EVALUATIONS = 8

# Steps that the progress bar's loss is a mean of; one rank's part of one batch is mostly noise.
RECENT_STEPS = 50

# Held-out scenes whose predictions the report shows.
SHOWN_SCENES = 6


class Course:
    """One rank's way through a training: steps, evaluations, and what the steps cost.

    All ranks estimate the running statistics of an evaluation; rank 0, which then has the same as
    the others, evaluates.
    """

    def __init__(
        self,
        source: SceneSource,
        settings: Settings,
        seed: int,
        arrangement: Arrangement,
        rank: Rank,
    ) -> None:
        share = rank.share(settings.global_batch)
        self._settings = settings
        self._seed = seed
        self._arrangement = arrangement
        self._rank = rank
        self._trainer = Trainer(source, settings, seed, arrangement.scope, share)
        self._held_out = held_out_batch(source)
        self._losses = torch.zeros(settings.steps)
        self._stages: list[Stage] = []
        self._evaluated_steps: list[int] = []
        self._mean_ious: list[float] = []
        self._seconds = 0.0
        self._synchronization_seconds = 0.0
        self._synchronization_bytes = 0

    def run(self) -> Training:
        """Trains from the first to the last step."""
        due = evaluation_steps(self._settings.steps)
        with self._progress_bar() as bar:
            for step in range(self._settings.steps):
                self._note_scope(step)
                self._take(step)
                bar.set_postfix(loss=f"{self._recent_loss(step):.3f}", refresh=False)
                bar.update(self._settings.global_batch)
                if step + 1 in due:
                    self._evaluate(step + 1)
        return self._training()

    def shown_predictions(self) -> torch.Tensor:
        """Predicts the scenes that the report shows."""
        return self._trainer.predict(self._held_out.images[:SHOWN_SCENES])

    def _note_scope(self, step: int) -> None:
        scope = self._trainer.scope
        if not self._stages or self._stages[-1].scope != scope:
            settings = self._settings
            size = norm_batch_size(scope, settings.ranks, settings.images_per_rank)
            self._stages.append(Stage(step, scope, size))

    def _take(self, step: int) -> None:
        before, start = normscope.communication_counters(), time.perf_counter()
        self._losses[step] = self._trainer.step(step)
        self._seconds += time.perf_counter() - start
        after = normscope.communication_counters()
        self._synchronization_seconds += after.seconds - before.seconds
        self._synchronization_bytes += after.bytes - before.bytes

    def _evaluate(self, steps_done: int) -> None:
        self._trainer.estimate_running_stats()
        if self._rank.number == 0:
            self._evaluated_steps.append(steps_done)
            self._mean_ious.append(self._trainer.evaluate(self._held_out))
        dist.barrier()  # Else the others' next step would have begun, and its time would count.

    def _recent_loss(self, step: int) -> float:
        """Estimates the global batch's loss from this rank's part, over the last steps."""
        recent = self._losses[max(0, step + 1 - RECENT_STEPS) : step + 1]
        return float(recent.mean()) * self._rank.count

    def _progress_bar(self) -> tqdm[None]:
        images = self._settings.global_batch * self._settings.steps
        seed = f", seed {self._seed}" if len(self._settings.seeds) > 1 else ""
        return tqdm(
            total=images,
            desc=f"{self._arrangement.scope:>11}{seed}",
            unit=" images",
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
            disable=self._rank.number != 0,
        )

    def _training(self) -> Training:
        dist.all_reduce(self._losses)
        share = torch.tensor(self._synchronization_seconds / self._seconds)
        dist.all_reduce(share)
        steps = self._settings.steps
        return Training(
            self._arrangement,
            self._seed,
            self._stages,
            Quality(self._losses.tolist(), self._evaluated_steps, self._mean_ious),
            Speed(
                seconds=self._seconds,
                images_per_second=steps * self._settings.global_batch / self._seconds,
                synchronization_share=float(share) / self._rank.count,
                bytes_per_step=self._synchronization_bytes / steps,
            ),
        )


def evaluation_steps(steps: int) -> set[int]:
    """Spreads the evaluations evenly, the last one after the last step.

    Example:
        >>> sorted(evaluation_steps(80))
        [10, 20, 30, 40, 50, 60, 70, 80]
    """
    return {-(-steps * i // EVALUATIONS) for i in range(1, EVALUATIONS + 1)}


def _save(course: Course, training: Training, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    training.save(folder / RESULT_FILE)
    np.save(folder / PREDICTIONS_FILE, course.shown_predictions().numpy())


@record
def main() -> None:
    """Trains every scope from every seed; rank 0 writes what came out.

    One start for all of them, since a start takes as long as many steps. Scopes follow each other
    under each seed, so that a machine that grows slower meanwhile is slower for all of them.
    """
    settings, scopes, output = parse_arguments(__doc__)
    arrangements = [arrange(scope, settings.ranks, settings.images_per_rank) for scope in scopes]

    def train(rank: Rank) -> None:
        source = settings.source()
        for seed, arrangement in itertools.product(settings.seeds, arrangements):
            course = Course(source, settings, seed, arrangement, rank)
            training = course.run()
            if rank.number == 0:
                _save(course, training, training_folder(output, arrangement, seed))

    run_as_rank(train)


if __name__ == "__main__":
    main()
