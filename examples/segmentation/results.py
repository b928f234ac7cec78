# SPDX-License-Identifier: Apache-2.0
"""What the ranks hand to the report."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from settings import Arrangement

RESULT_FILE = "result.json"
PREDICTIONS_FILE = "predictions.npy"
CHECK_FILE = "check.json"


@dataclass(frozen=True)
class Quality:
    """What the training came to; the same command gives the same numbers.

    Args:
        losses: of the global batch at every step.
        evaluated_steps: number of steps done at each evaluation.
        mean_ious: on held-out scenes, at each evaluation.
    """

    losses: list[float]
    evaluated_steps: list[int]
    mean_ious: list[float]


@dataclass(frozen=True)
class Speed:
    """What the training cost, evaluations left out.

    Args:
        seconds: that all steps took.
        images_per_second: of all ranks together.
        synchronization_share: part of a rank's time spent in the collectives of batch
            normalization, waiting for other ranks included; mean over the ranks.
        bytes_per_step: payload that a rank sends for batch normalization in a step.
    """

    seconds: float
    images_per_second: float
    synchronization_share: float
    bytes_per_step: float


@dataclass(frozen=True)
class Stage:
    """A part of the training in which the scope stayed the same.

    Args:
        first_step: of the part.
        scope: as normscope spells it.
        norm_batch_size: images that one set of statistics was computed over.
    """

    first_step: int
    scope: str
    norm_batch_size: int

    def __str__(self) -> str:
        return f"{self.scope} from step {self.first_step}"


@dataclass(frozen=True)
class Training:
    """Everything that is told about one scope trained from one seed; one stage, or the schedule."""

    arrangement: Arrangement
    seed: int
    stages: list[Stage]
    quality: Quality
    speed: Speed

    def save(self, path: Path) -> None:
        """Writes the result as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Training:
        """Reads what `save` wrote."""
        fields = json.loads(path.read_text())
        return cls(
            Arrangement(**fields["arrangement"]),
            fields["seed"],
            [Stage(**stage) for stage in fields["stages"]],
            Quality(**fields["quality"]),
            Speed(**fields["speed"]),
        )


def training_folder(output: Path, arrangement: Arrangement, seed: int) -> Path:
    """Where the ranks leave what came out of one training."""
    return output / arrangement.name / f"seed-{seed}"


@dataclass(frozen=True)
class Comparison:
    """How far two ways to train are apart after the first steps.

    Args:
        ranks: the way with several processes, in words.
        alone: the way with one process, in words.
        steps: optimizer steps taken.
        difference: largest difference of a loss, a parameter or a running statistic, relative to
            the largest number of its kind.
        tolerance: that the difference may not exceed.
    """

    ranks: str
    alone: str
    steps: int
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether both train alike; NaN does not pass."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "FAILED"
        return (
            f"{verdict}: {self.ranks} trains as {self.alone}: after {self.steps} steps they differ "
            f"by {self.difference:.1e} (at most {self.tolerance:.1e} is rounding)"
        )


def save_comparisons(comparisons: list[Comparison], path: Path) -> None:
    """Writes comparisons as JSON."""
    path.write_text(json.dumps([dataclasses.asdict(comparison) for comparison in comparisons]))


def load_comparisons(path: Path) -> list[Comparison]:
    """Reads what `save_comparisons` wrote."""
    return [Comparison(**fields) for fields in json.loads(path.read_text())]
