#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/recommending.md and of README's beginning from one file of results.

benchmarks/recommended_scopes.py --results has written the file.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from performance_tables import table, with_tables  # noqa: E402
from scope_results import Result, interval, ratios_to_world, read  # noqa: E402

RESULTS = ROOT / "benchmarks/results/recommended-scopes.jsonl"

# The limit for the noise was chosen on seeds 0 to 2 of four ranks and ten classes.
TEST = range(3, 8)

# Measures were compared on one of those.
MEASURED = range(1)

NETWORKS = {
    "land-pyramid": "PSPNet",
    "land-unet": "U-Net",
    "land-demo": "DeepLab (the demo's)",
    "land-features": "feature pyramid",
    "six-pyramid": "PSPNet, six classes",
    "six-unet": "U-Net, six classes",
    "six-demo": "DeepLab, six classes",
    "scenes": "DeepLab, scenes",
    "digits": "digits",
    "sequences": "sequences",
}


@cache
def results() -> list[Result]:
    """Read the file."""
    return read(RESULTS)


def _chosen(task: str, scopes: str, seeds: Iterable[int]) -> list[Result]:
    seeds = list(seeds)
    return [
        one
        for one in results()
        if (one.task, one.scopes) == (task, scopes) and one.seed in seeds and one.processes == 1
    ]


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def quality(tasks: Iterable[str], rules: dict[str, str], seeds: range) -> str:
    """Return the mean quality of each rule for each task, with the ratio to world."""
    rows = []
    for task in tasks:
        row = [NETWORKS[task.partition("@")[0]]]
        for scopes in rules:
            chosen = _chosen(task, scopes, seeds)
            ratios = ratios_to_world(chosen, results())
            own = f"{_mean(one.quality for one in chosen):.3f}"
            row.append(own if scopes == "world" else f"{own} ({_mean(ratios):.2f})")
        rows.append(row)
    return table(["", *rules.values()], rows)


def recommended(tasks: Iterable[str], seeds: range, scopes: str = "recommended") -> str:
    """Return the ratio of plans to world, with its interval, and what they send."""
    rows = []
    for task in tasks:
        name, _, ranks = task.partition("@")
        chosen, wide = _chosen(task, scopes, seeds), _chosen(task, "world", seeds)
        ratios = ratios_to_world(chosen, results())
        rows.append(
            [
                NETWORKS[name],
                ranks.replace("x", " x "),
                f"{_mean(one.quality for one in wide):.3f}",
                f"{_mean(ratios):.3f}, {interval(ratios)}",
                f"{min(ratios):.2f}",
                f"{_mean(one.bytes_at_end for one in chosen):.0%}",
            ]
        )
    columns = ["network", "ranks x images", "`world`", "plan / `world`, 90 % interval", "least"]
    return table([*columns, "bytes"], rows)


def _ratio(task: str, scopes: str, seeds: Iterable[int]) -> list[float]:
    return ratios_to_world(_chosen(task, scopes, seeds), results())


def others(tasks: Iterable[str], rules: dict[str, str], seeds: range) -> str:
    """Return the ratio to world of each rule for each task, and the bytes over the training."""
    rows = []
    for scopes, name in rules.items():
        row = [name]
        for task in tasks:
            sent = _mean(one.bytes for one in _chosen(task, scopes, seeds))
            row.append(f"{_mean(_ratio(task, scopes, seeds)):.2f} at {sent:.0%}")
        rows.append(row)
    return table(["", *(NETWORKS[task.partition("@")[0]] for task in tasks)], rows)


def measures(tasks: Iterable[str], seeds: range) -> str:
    """Return the mean ratio to world if a measure orders the layers, at shares of the bytes."""
    names = {
        "noise": "output noise per byte",
        "gradient": "noise of the parameters' gradient per byte",
        "loss": "change of the loss per byte",
        "values": "1 / independent values per byte",
        "chance": "at random",
    }
    tasks = list(tasks)
    rows = []
    for measure, name in names.items():
        row = [name]
        for share in (30, 60):
            ratios = [r for task in tasks for r in _ratio(task, f"{measure}={share}%", seeds)]
            row.append(f"{_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        rows.append(row)
    return table(["order of the layers", "30 % of the bytes", "60 %"], rows)


def first_screen() -> str:
    """Return the table of README: no layer, the recommended ones, all."""
    rows = []
    for task in ("land-unet@4x2", "land-demo@4x2"):
        for scopes, name in (
            ("local", "none"),
            ("recommended", "the recommended ones"),
            ("world", "all"),
        ):
            chosen = _chosen(task, scopes, TEST)
            values = [one.quality for one in chosen]
            rows.append(
                [
                    NETWORKS[task.partition("@")[0]] if scopes == "local" else "",
                    name,
                    f"{_mean(values):.3f} ± {statistics.stdev(values):.3f}",
                    f"{_mean(one.bytes_at_end for one in chosen):.0%}",
                ]
            )
    return table(["network", "layers that synchronize", "mean IoU", "bytes of the last step"], rows)


LAND = ("land-pyramid@4x2", "land-unet@4x2", "land-demo@4x2")
RULES = {
    "world": "`world`",
    "local": "`local`",
    "recommended": "recommended",
    "kept": "the same plan from the first step",
    "random": "as many bytes at random",
    "pooled": "`world` after global pooling",
}
OTHER_RULES = {
    "recommended": "recommended",
    "values<4": "`world` where a norm batch is worth fewer than 4 values",
    "sum<0.8": "the sum of 1 / values over all layers below 0.8",
    "progressive": "progressive: `local`, `group:2`, `world` for a third of the steps each",
    "group-norm": "group normalization",
    "local": "`local`",
}
LIMITS = {"recommended": "5 %", "recommended=0.1": "10 %", "recommended=0.2": "20 %"}
SMALL = ("scenes@4x2", "digits@4x2", "sequences@4x2")
OTHERS = (
    *("land-pyramid@8x2", "land-unet@8x2", "land-demo@8x2", "land-features@4x2"),
    *("six-pyramid@4x2", "six-unet@4x2", "six-demo@4x2"),
)

DOCUMENTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"recommended": first_screen},
    "docs/recommending.md": {
        "rules": partial(quality, LAND, RULES, TEST),
        "plans": partial(recommended, (*LAND, *OTHERS), TEST),
        "small": partial(recommended, SMALL, range(5)),
        "measures": partial(measures, LAND, MEASURED),
        "limits": partial(others, LAND, LIMITS, MEASURED),
        "others": partial(others, LAND, OTHER_RULES, range(3, 6)),
    },
}


def main() -> None:
    """Rewrite the tables of all documents."""
    for document, tables in DOCUMENTS.items():
        path = ROOT / document
        path.write_text(with_tables(path.read_text(), tables))


if __name__ == "__main__":
    main()
