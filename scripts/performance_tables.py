#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance.md from the results in benchmarks/results.

A table is between `<!-- table: NAME -->` and `<!-- end -->`. A file of results is what a benchmark
wrote with `--json`, or the part of it that was kept. Its "command" repeats the measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results"

DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("forward", "backward")
# The time of this input is that of a call, with almost nothing to compute: no mean includes it.
SMALLEST = [2, 8, 1, 1]

_TABLE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """Read benchmarks/results/<name>.json."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return content


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    columns = list(columns)
    lines = [columns, ["---"] * len(columns), *map(list, rows)]
    return "".join(f"|{'|'.join(_padded(cells))}|\n" for cells in lines)


def _padded(cells: list[str]) -> list[str]:
    return [cell if set(cell) == {"-"} else f" {cell} " if cell else " " for cell in cells]


def _arrangement(result: dict[str, Any]) -> str:
    arrangement = result["arrangement"]
    threads = f"{arrangement['threads']} thread{'s' if arrangement['threads'] > 1 else ''}"
    if arrangement["processes"] == 1:
        return f"{arrangement['scope']}, {threads}"
    return f"{arrangement['scope']}, {arrangement['processes']} ranks of {threads}"


def _input(result: dict[str, Any]) -> str:
    case = result["case"]
    return f"{'x'.join(map(str, case['shape']))} {case['layout']}"


def _quartiles(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})"


def _in_means(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the timings by arrangement and type, without those of the smallest input."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["case"]["shape"] != SMALLEST:
            key = f"{_arrangement(result)}/{result['case']['dtype']}"
            groups.setdefault(key, []).append(result["timing"])
    return groups


def layers_summary() -> str:
    """Return the ratios to torch.nn: the geometric mean over the inputs, and the smallest."""
    groups = _in_means(load("layers-zen4")["results"])
    rows = []
    for arrangement in dict.fromkeys(key.split("/")[0] for key in groups):
        row = [arrangement]
        for dtype in DTYPES:
            for direction in DIRECTIONS:
                ratios = [
                    timing[direction]["ratio"]["median"]
                    for timing in groups[f"{arrangement}/{dtype}"]
                ]
                row.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})")
        rows.append(row)
    return table(_summary_columns(), rows)


def layers_summary_of_zen3() -> str:
    """Return the same table for a run of which only the summary was kept."""
    rows: dict[str, list[str]] = {}
    for one in load("layers-zen3")["summary"]:
        row = rows.setdefault(_arrangement(one), [])
        row += [f"{one[way]['mean']:.2f} ({one[way]['least']:.2f})" for way in DIRECTIONS]
    return table(_summary_columns(), ([name, *row] for name, row in rows.items()))


def _summary_columns() -> list[str]:
    return ["", *(f"{dtype} {direction}" for dtype in DTYPES for direction in DIRECTIONS)]


def world_over_local() -> str:
    """Return the time of scope world divided by that of local: geometric mean, and the largest."""
    results = load("layers-zen4")["results"]
    rows = []
    for arrangement in dict.fromkeys(map(_arrangement, results)):
        row = [arrangement]
        for direction in DIRECTIONS:
            timings = [one["timing"][direction] for one in results]
            ratios = [
                timing["of_local"]["median"]
                for timing, one in zip(timings, results, strict=True)
                if timing["of_local"] and _arrangement(one) == arrangement
            ]
            if ratios:
                row.append(f"{geometric_mean(ratios):.2f} ({max(ratios):.2f})")
        if len(row) > 1:
            rows.append(row)
    return table(["", *DIRECTIONS], rows)


def layers(dtype: str) -> str:
    """Return the ratios to torch.nn for every input of one type: median, forward / backward."""
    results = load("layers-zen4")["results"]
    arrangements = list(dict.fromkeys(map(_arrangement, results)))
    cells: dict[str, dict[str, str]] = {}
    for result in results:
        if result["case"]["dtype"] == dtype:
            medians = [result["timing"][way]["ratio"]["median"] for way in DIRECTIONS]
            row = cells.setdefault(_input(result), {})
            row[_arrangement(result)] = " / ".join(f"{median:.2f}" for median in medians)
    rows = ([name, *(row[one] for one in arrangements)] for name, row in cells.items())
    return table(["input", *arrangements], rows)


def comparisons() -> str:
    """Return the ratios of times for comparisons other than training a layer of torch.nn."""
    rows = [
        [
            f"{_input(one)} {one['case']['dtype']}",
            one["name"],
            *(_quartiles(one[way]) if one[way] else "" for way in DIRECTIONS),
        ]
        for one in load("layers-zen4")["comparisons"]
    ]
    return table(["input", "times divided", *DIRECTIONS], rows)


def memory() -> str:
    """Return the peak memory of a training step, and the bytes kept from forward to backward."""
    run = load("layers-zen4")
    rows = (
        [name, f"{mebibytes:.1f}", f"{run['statistics_bytes_a_channel'][name]:.0f}"]
        for name, mebibytes in run["peak_memory_mebibytes"].items()
    )
    return table(["", "peak, MiB", "statistics kept, bytes per channel"], rows)


def all_reduce() -> str:
    """Return the microseconds of an all-reduce, by ranks and bytes."""
    results = load("all_reduce-zen4")["results"]
    sizes = list(dict.fromkeys(one["bytes"] for one in results))
    rows: dict[int, list[str]] = {}
    for one in results:
        rows.setdefault(one["ranks"], []).append(f"{one['microseconds']:.1f}")
    return table(
        ["ranks", *(f"{size // 1024} KiB" for size in sizes)],
        ([str(ranks), *row] for ranks, row in rows.items()),
    )


def networks_compiled() -> str:
    """Return the ratios of compiled training steps."""
    rows = []
    for one in load("networks-compiled-zen4")["results"]:
        setting, result = one["setting"], one["result"]
        layout = ", channels-last" if setting["layout"] == "channels_last" else ""
        ranks = ", 2 ranks" if setting["scope"] == "world" else ""
        lower, median, upper = result["ratio"]
        row = [
            f"{setting['network']}, batch {setting['batch']}{layout}",
            f"`{setting['scope']}`{ranks}",
            f"{median:.2f} ({lower:.2f}-{upper:.2f})",
        ]
        rows.append(row)
    return table(["network", "scope", "step"], rows)


def paths() -> str:
    """Return the ratios of times in networks with and without paths of the kernels."""
    rows = (
        [one["path"], one["networks"], f"{one['of_without']:.2f}"]
        for one in load("paths-zen4")["results"]
    )
    return table(["path", "networks", "with / without"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "layers-summary": layers_summary,
    "layers-summary-zen3": layers_summary_of_zen3,
    "world-over-local": world_over_local,
    "layers-float32": lambda: layers("float32"),
    "layers-bfloat16": lambda: layers("bfloat16"),
    "comparisons": comparisons,
    "memory": memory,
    "all-reduce": all_reduce,
    "networks-compiled": networks_compiled,
    "paths": paths,
}


def with_tables(text: str) -> str:
    """Return the document's text with all tables rewritten.

    Raises:
        ValueError: If the text does not have each table of TABLES exactly once, and no other.
    """
    names = [match["name"] for match in _TABLE.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"tables: expected each of {sorted(TABLES)}, got {sorted(names)}")
    return _TABLE.sub(lambda found: found[1] + TABLES[found["name"]]() + found[3], text)


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
