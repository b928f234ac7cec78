# SPDX-License-Identifier: Apache-2.0
"""What a scope came to over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from results import PREDICTIONS_FILE, RESULT_FILE, Training, training_folder
from settings import Arrangement


@dataclass(frozen=True)
class Spread:
    """A number that each seed gave: the mean, and the standard deviation where there are several.

    Example:
        >>> f"{Spread.of([0.5, 0.6]):.3f}"
        '0.550 ± 0.071'
        >>> f"{Spread.of([0.5]):.3f}"
        '0.500'
    """

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Over at least one value; the deviation divides by their number less one."""
        several = len(values) > 1
        return cls(statistics.fmean(values), statistics.stdev(values) if several else None)

    def __format__(self, specification: str) -> str:
        mean = format(self.mean, specification)
        return (
            mean if self.deviation is None else f"{mean} ± {format(self.deviation, specification)}"
        )


@dataclass(frozen=True)
class Outcome:
    """All trainings of one scope, and the first seed's predictions [n, side, side]."""

    trainings: list[Training]
    predictions: npt.NDArray[np.int64]

    @classmethod
    def load(cls, output: Path, arrangement: Arrangement, seeds: tuple[int, ...]) -> Outcome:
        """Reads what the ranks left."""
        folders = [training_folder(output, arrangement, seed) for seed in seeds]
        return cls(
            [Training.load(folder / RESULT_FILE) for folder in folders],
            np.load(folders[0] / PREDICTIONS_FILE),
        )

    @property
    def arrangement(self) -> Arrangement:
        """How every seed was trained."""
        return self.trainings[0].arrangement

    @property
    def scope(self) -> str:
        """The scope, or progressive."""
        return self.arrangement.scope

    @property
    def schedule(self) -> str:
        """The scopes in words, with the steps at which they begin."""
        return ", ".join(str(stage) for stage in self.trainings[0].stages)

    @property
    def norm_batch_sizes(self) -> str:
        """Images that one set of statistics was computed over, stage by stage."""
        return ", ".join(str(stage.norm_batch_size) for stage in self.trainings[0].stages)

    @property
    def mean_iou(self) -> Spread:
        """After the last step, on held-out scenes."""
        return self._spread(lambda training: training.quality.mean_ious[-1])

    @property
    def seconds(self) -> Spread:
        """That all steps took."""
        return self._spread(lambda training: training.speed.seconds)

    @property
    def images_per_second(self) -> Spread:
        """Of all ranks together."""
        return self._spread(lambda training: training.speed.images_per_second)

    @property
    def synchronization_share(self) -> Spread:
        """Part of a rank's time spent in the collectives of batch normalization."""
        return self._spread(lambda training: training.speed.synchronization_share)

    @property
    def bytes_per_step(self) -> float:
        """That a rank sent for batch normalization; no seed changes it."""
        return self.trainings[0].speed.bytes_per_step

    def _spread(self, number: Callable[[Training], float]) -> Spread:
        return Spread.of([number(training) for training in self.trainings])
