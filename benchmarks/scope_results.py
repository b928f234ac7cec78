# SPDX-License-Identifier: Apache-2.0
"""The results of trainings under scopes, as lines of JSON and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from scipy import stats


@dataclass(frozen=True)
class Result:
    """The result of a training, and a rank's exchanges and bytes relative to those of world."""

    task: str
    scopes: str
    seed: int
    quality: float
    exchanges: float
    bytes: float
    wide_layers: dict[str, str]  # at the end
    processes: int = 1  # a single process stands for four ranks


def read(path: Path) -> list[Result]:
    """Read the results from a file; there are none if it does not exist."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def append(path: Path, result: Result) -> None:
    """Append a result to a file."""
    with path.open("a") as file:
        file.write(line(result) + "\n")


def line(result: Result) -> str:
    """Return a result as a line of JSON."""
    return json.dumps(asdict(result))


def table(results: Iterable[Result]) -> str:
    """Return a table of the quality, and its ratio to world: mean and 90 % interval."""
    results = list(results)
    lines = [
        f"{'':13}{'ranks':>6} {'scopes':24}{'seeds':>6}{'quality':>16}{'of world':>9}"
        f"{'90 % interval':>17}{'exchanges':>10}{'bytes':>6}"
    ]
    for key in dict.fromkeys((one.task, one.processes, one.scopes) for one in results):
        task, processes, scopes = key
        chosen = [one for one in results if (one.task, one.processes, one.scopes) == key]
        world = {
            one.seed: one.quality
            for one in results
            if (one.task, one.processes, one.scopes) == (task, processes, "world")
        }
        ratios = [one.quality / world[one.seed] for one in chosen if one.seed in world]
        quality = [one.quality for one in chosen]
        spread = statistics.stdev(quality) if len(quality) > 1 else 0.0
        lines.append(
            f"{task:13}{processes:6} {scopes:24}{len(chosen):6}"
            f"{statistics.fmean(quality):8.3f} ± {spread:.3f}"
            f"{statistics.fmean(ratios) if ratios else float('nan'):9.3f}"
            f"{_interval(ratios):>17}"
            f"{statistics.fmean(one.exchanges for one in chosen):10.0%}"
            f"{statistics.fmean(one.bytes for one in chosen):6.0%}"
        )
    return "\n".join(lines)


def _interval(values: list[float]) -> str:
    """Return the interval of the mean by Student's t-distribution; empty for a single value."""
    if len(values) < 2:
        return ""
    error = statistics.stdev(values) / len(values) ** 0.5
    reach = float(stats.t.ppf(0.95, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return f"{mean - reach:.3f} to {mean + reach:.3f}"
