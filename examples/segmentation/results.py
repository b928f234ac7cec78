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
        images_per_second: of all ranks together.
        synchronization_share: part of a rank's time spent in the collectives of batch
            normalization, waiting for other ranks included; mean over the ranks.
        bytes_per_step: payload that a rank sends for batch normalization in a step.
    """

    images_per_second: float
    synchronization_share: float
    bytes_per_step: float


@dataclass(frozen=True)
class ScopeResult:
    """Everything that is told about one scope."""

    arrangement: Arrangement
    quality: Quality
    speed: Speed

    def save(self, path: Path) -> None:
        """Writes the result as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ScopeResult:
        """Reads what `save` wrote."""
        fields = json.loads(path.read_text())
        return cls(
            Arrangement(**fields["arrangement"]),
            Quality(**fields["quality"]),
            Speed(**fields["speed"]),
        )


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
