#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/performance.md from the results in benchmarks/results.

A table is between `<!-- table: NAME -->` and `<!-- end -->`. A file of results is what a benchmark
wrote with `--json`, or the part of it that was kept. Its "command" repeats the measurement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results"

DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("forward", "backward")
COLUMNS = [f"{dtype} {direction}" for dtype in DTYPES for direction in DIRECTIONS]
# The time of this input is that of a call, with almost nothing to compute: no mean includes it.
SMALLEST = [2, 8, 1, 1]
# The arrangements that the table of all inputs shows, and how it calls them.
SHOWN = {"local, 1 thread": "`local`", "world, 2 ranks of 1 thread": "`world`"}

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


def networks() -> str:
    """Return the ratios of training steps: median and quartiles."""
    rows = []
    for one in load("networks-compiled-zen4")["results"]:
        setting, (lower, median, upper) = one["setting"], one["result"]["ratio"]
        layout = ", channels-last" if setting["layout"] == "channels_last" else ""
        ranks = ", 2 ranks" if setting["scope"] == "world" else ""
        row = [
            f"{setting['network']}, batch {setting['batch']}{layout}",
            f"`{setting['scope']}`{ranks}",
            f"{median:.2f} ({lower:.2f}-{upper:.2f})",
        ]
        rows.append(row)
    return table(["compiled network", "scope", "step"], rows)


def layers() -> str:
    """Return the ratios to torch.nn: the geometric mean over the inputs, and the smallest."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in load("layers-zen4")["results"]:
        if result["case"]["shape"] != SMALLEST:
            groups.setdefault(_arrangement(result), []).append(result)
    rows = []
    for name, results in groups.items():
        row = [name]
        for dtype in DTYPES:
            of_dtype = [one["timing"] for one in results if one["case"]["dtype"] == dtype]
            for way in DIRECTIONS:
                ratios = [timing[way]["ratio"]["median"] for timing in of_dtype]
                row.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})")
        rows.append(row)
    return table(["", *COLUMNS], rows)


def layers_of_zen3() -> str:
    """Return the same table for a run of which only the summary was kept."""
    rows: dict[str, list[str]] = {}
    for one in load("layers-zen3")["summary"]:
        row = rows.setdefault(_arrangement(one), [])
        row += [f"{one[way]['mean']:.2f} ({one[way]['least']:.2f})" for way in DIRECTIONS]
    return table(["", *COLUMNS], ([name, *row] for name, row in rows.items()))


def inputs() -> str:
    """Return the ratios to torch.nn for every input: medians, forward / backward."""
    rows: dict[str, dict[str, str]] = {}
    for result in load("layers-zen4")["results"]:
        if _arrangement(result) in SHOWN:
            column = f"{result['case']['dtype']}, {SHOWN[_arrangement(result)]}"
            medians = [f"{result['timing'][way]['ratio']['median']:.2f}" for way in DIRECTIONS]
            rows.setdefault(_input(result), {})[column] = " / ".join(medians)
    columns = [f"{dtype}, {scope}" for dtype in DTYPES for scope in SHOWN.values()]
    return table(
        ["input", *columns],
        ([name, *(row[column] for column in columns)] for name, row in rows.items()),
    )


def world_over_local() -> str:
    """Return the time of scope world divided by that of local: geometric mean, and the largest."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for result in load("layers-zen4")["results"]:
        if result["timing"]["forward"]["of_local"]:
            rows.setdefault(_arrangement(result), []).append(result["timing"])
    cells = []
    for name, timings in rows.items():
        both = [[timing[way]["of_local"]["median"] for timing in timings] for way in DIRECTIONS]
        cells.append([name, *(f"{geometric_mean(one):.2f} ({max(one):.2f})" for one in both)])
    return table(["", *DIRECTIONS], cells)


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


def memory() -> str:
    """Return the peak memory of a training step, and the bytes kept from forward to backward."""
    run = load("layers-zen4")
    rows = (
        [name, f"{mebibytes:.1f}", f"{run['statistics_bytes_a_channel'][name]:.0f}"]
        for name, mebibytes in run["peak_memory_mebibytes"].items()
    )
    return table(["", "peak, MiB", "statistics kept, bytes per channel"], rows)


def comparisons(*names: str) -> str:
    """Return ratios of times, for the comparisons of these names: median and quartiles."""
    rows = []
    for one in load("layers-zen4")["comparisons"]:
        if one["name"] in names:
            cells = [
                f"{way['median']:.2f} ({way['lower']:.2f}-{way['upper']:.2f})" if way else ""
                for way in (one["forward"], one["backward"])
            ]
            rows.append([_input(one), one["name"], *cells])
    return table(["input", "times divided", *DIRECTIONS], rows)


def paths() -> str:
    """Return the ratios of times in networks with and without paths of the kernels."""
    rows = (
        [one["path"], one["networks"], f"{one['of_without']:.2f}"]
        for one in load("paths-zen4")["results"]
    )
    return table(["path", "networks", "with / without"], rows)


def gpu_networks(how: str) -> str:
    """Return torch's milliseconds and the ratios to it, for steps that are run so."""
    results = [one for one in load("nvidia-h200")["networks"] if one["how"] == how]
    others = {"local": "`local`", "world": "`world`", "sync": "torch's SyncBatchNorm"}
    columns = [name for name in others if name in results[0]["seconds"]]
    rows = []
    for one in results:
        torchs = one["seconds"]["torch"]
        cells = [" ".join(map(str, one["setting"].values())), f"{1e3 * median(torchs):.2f}"]
        for name in columns:
            of_rounds = zip(torchs, one["seconds"][name], strict=True)
            cells.append(f"{median(torch / ours for torch, ours in of_rounds):.2f}")
        rows.append(cells)
    return table(["batch, layout, dtype", "torch, ms", *(others[c] for c in columns)], rows)


def gpu_layers(time: str) -> str:
    """Return ratios of the times of forward and backward together, over all large inputs."""
    pairs = {
        "BatchNorm2d / `local`": ("torch BatchNorm2d", "normscope local"),
        "BatchNorm2d / `world`": ("torch BatchNorm2d", "normscope world"),
        "SyncBatchNorm / `world`": ("torch SyncBatchNorm", "normscope world"),
    }
    taken: dict[str, dict[str, dict[str, float]]] = {}
    for row in load("nvidia-h200")["layers"]:
        shape, layout, dtype = row["case"].split()
        if shape != "x".join(map(str, SMALLEST)):
            of_group = taken.setdefault(f"{dtype} {layout}", {})
            of_group.setdefault(shape, {})[row["layer"]] = sum(row[way][time] for way in DIRECTIONS)
    rows = []
    for name, inputs_of in sorted(taken.items()):
        cells = [name]
        for theirs, ours in pairs.values():
            ratios = [one[theirs] / one[ours] for one in inputs_of.values()]
            cells.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
        rows.append(cells)
    return table(["", *pairs], rows)


def host_instructions() -> str:
    """Return the instructions of a call."""
    rows = [
        [device, layer, *(f"{counts[way]:,}".replace(",", " ") for way in DIRECTIONS)]
        for device, layers in load("host-instructions")["results"].items()
        for layer, counts in layers.items()
    ]
    return table(["device", "layer", *DIRECTIONS], rows)


TABLES: dict[str, Callable[[], str]] = {
    "networks": networks,
    "layers": layers,
    "layers-zen3": layers_of_zen3,
    "inputs": inputs,
    "world-over-local": world_over_local,
    "all-reduce": all_reduce,
    "memory": memory,
    "others": lambda: comparisons("oneDNN / normscope", "XLA / normscope"),
    "slices": lambda: comparisons("slices:8 / local"),
    "paths": paths,
    "gpu-networks-graph": lambda: gpu_networks("graph"),
    "gpu-networks-eager": lambda: gpu_networks("eager"),
    "gpu-layers-graph": lambda: gpu_layers("graph"),
    "gpu-layers-eager": lambda: gpu_layers("eager"),
    "host-instructions": host_instructions,
}


def with_tables(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """Return the document's text with all tables rewritten.

    Raises:
        ValueError: If the text does not have each of the tables exactly once, and no other.
    """
    names = [match["name"] for match in _TABLE.finditer(text)]
    if sorted(names) != sorted(tables):
        raise ValueError(f"tables: expected each of {sorted(tables)}, got {sorted(names)}")
    return _TABLE.sub(lambda found: found[1] + tables[found["name"]]() + found[3], text)


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
