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
    """The result of a training, and a rank's bytes relative to those of world.

    Args:
        task: What was trained, as scope_tasks.Setting writes it.
        scopes: The rule.
        seed: Seed of the initial weights and of the data.
        quality: Mean IoU or accuracy on held-out data.
        bytes: Share of the bytes of world over the whole training.
        bytes_at_end: The same in the last step.
        exchanges_at_end: Share of the exchanges of world in the last step.
        wide: The layers that do not have local at the end, with their scopes.
        processes: 1 if one process stood for all ranks.
        step_seconds: Mean time of the steps after a plan would be made; 0 if not measured.
    """

    task: str
    scopes: str
    seed: int
    quality: float
    bytes: float
    bytes_at_end: float
    exchanges_at_end: float
    wide: dict[str, str]
    processes: int = 1
    step_seconds: float = 0.0


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
    """Return a table of the quality, and its ratio to world: mean, 90 % interval and least."""
    results = list(results)
    lines = [
        f"{'':18}{'scopes':18}{'seeds':>6}{'quality':>16}{'of world':>9}"
        f"{'90 % interval':>17}{'least':>7}{'bytes':>7}{'at end':>7}"
    ]
    for key in dict.fromkeys((one.task, one.scopes) for one in results):
        chosen = [one for one in results if (one.task, one.scopes) == key]
        quality = [one.quality for one in chosen]
        ratios = ratios_to_world(chosen, results)
        spread = statistics.stdev(quality) if len(quality) > 1 else 0.0
        lines.append(
            f"{key[0]:18}{key[1]:18}{len(chosen):6}"
            f"{statistics.fmean(quality):8.3f} ± {spread:.3f}"
            + (f"{statistics.fmean(ratios):9.3f}" if ratios else f"{'':9}")
            + f"{interval(ratios):>17}"
            + (f"{min(ratios):7.2f}" if ratios else f"{'':7}")
            + f"{statistics.fmean(one.bytes for one in chosen):7.0%}"
            f"{statistics.fmean(one.bytes_at_end for one in chosen):7.0%}"
        )
    return "\n".join(lines)


def ratios_to_world(chosen: Iterable[Result], results: Iterable[Result]) -> list[float]:
    """Return the quality of each result, divided by that of world from the same seed."""
    world = {
        (one.task, one.seed, one.processes): one.quality for one in results if one.scopes == "world"
    }
    keys = ((one, (one.task, one.seed, one.processes)) for one in chosen)
    return [one.quality / world[key] for one, key in keys if key in world]


def interval(values: list[float]) -> str:
    """Return the interval of the mean by Student's t-distribution; empty for a single value."""
    if len(values) < 2:
        return ""
    error = statistics.stdev(values) / len(values) ** 0.5
    reach = float(stats.t.ppf(0.95, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return f"{mean - reach:.3f} to {mean + reach:.3f}"
