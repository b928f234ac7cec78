# SPDX-License-Identifier: Apache-2.0
"""What trainings under scopes came to: as lines of JSON, and as a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from scipy import stats


@dataclass(frozen=True)
class Result:
    """What a training came to, and what share of world's exchanges and bytes a rank sent."""

    task: str
    scopes: str
    seed: int
    quality: float
    exchanges: float
    bytes: float
    wide_layers: dict[str, str]  # in the end
    processes: int = 1  # of which one stands for four ranks


def read(path: Path) -> list[Result]:
    """Those of a file; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def append(path: Path, result: Result) -> None:
    """Write one more, so that it is kept whatever comes."""
    with path.open("a") as file:
        file.write(line(result) + "\n")


def line(result: Result) -> str:
    """As JSON."""
    return json.dumps(asdict(result))


def table(results: Iterable[Result]) -> str:
    """Quality, and its ratio to that of world from the same seed: mean and 90 % interval."""
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
    """Of the mean, by Student's distribution; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    error = statistics.stdev(values) / len(values) ** 0.5
    reach = float(stats.t.ppf(0.95, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return f"{mean - reach:.3f} to {mean + reach:.3f}"
