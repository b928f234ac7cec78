# SPDX-License-Identifier: Apache-2.0
"""Tells what the scopes did: a table, metrics.json, and report.html, one file without links."""

from __future__ import annotations

import base64
import colorsys
import dataclasses
import io
import json
import os
import platform
import shlex
import string
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

import normscope
from chart import Series, line_chart
from results import Comparison, ScopeResult
from scenes import VOID, Batch
from settings import Settings

# Points of a loss curve; more would draw noise.
LOSS_POINTS = 40

HEADINGS = (
    "scope",
    "processes",
    "images per norm batch",
    "mean IoU",
    "images/s",
    "time in synchronization",
    "bytes sent per step",
)


@dataclass(frozen=True)
class Run:
    """What one scope came to, and the classes it predicts for the shown scenes [n, side, side]."""

    result: ScopeResult
    predictions: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Report:
    """Everything there is to tell; the runs predicted the first held-out scenes."""

    settings: Settings
    class_names: tuple[str, ...]
    held_out: Batch
    comparisons: list[Comparison]
    runs: list[Run]


def table(runs: list[Run]) -> str:
    """Formats the comparison for a terminal."""
    rows = [HEADINGS, *(_cells(run.result) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cells(result: ScopeResult) -> tuple[str, ...]:
    arrangement, speed = result.arrangement, result.speed
    return (
        arrangement.scope,
        str(arrangement.processes),
        str(arrangement.norm_batch_size),
        f"{result.quality.mean_ious[-1]:.3f}",
        f"{speed.images_per_second:.0f}",
        f"{speed.synchronization_share:.1%}",
        f"{speed.bytes_per_step:,.0f}",
    )


def write_metrics(report: Report, path: Path) -> None:
    """Writes what a program may want to read. `quality` is the same for the same command."""
    runs = {run.result.arrangement.scope: dataclasses.asdict(run.result) for run in report.runs}
    metrics = {
        "settings": dataclasses.asdict(report.settings),
        "versions": versions(),
        "check": [dataclasses.asdict(comparison) for comparison in report.comparisons],
        "scopes": runs,
    }
    path.write_text(json.dumps(metrics, indent=2) + "\n")


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "normscope": normscope.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
    }


def write_report(report: Report, path: Path) -> None:
    """Fills the page."""
    template = string.Template(Path(__file__).with_name("report.template.html").read_text())
    settings = report.settings
    path.write_text(
        template.substitute(
            summary=escape(summary([run.result for run in report.runs])),
            table=_html_table(report.runs),
            held_out=len(report.held_out.masks),
            legend=_legend(report.runs),
            iou_chart=line_chart("step", "mean IoU", [_iou_series(run) for run in report.runs]),
            loss_chart=line_chart("step", "loss", [_loss_series(run) for run in report.runs]),
            loss_point=_loss_point(_loss_window(settings.steps)),
            classes=_classes(report.class_names),
            pictures=_pictures(report),
            comparisons=_comparisons(report.comparisons),
            command=escape(shlex.join(["python", *sys.argv])),
            setting=escape(
                f"{settings.ranks} ranks, {settings.images_per_rank} images per rank, "
                f"{settings.steps} steps, seed {settings.seed}, {settings.device}"
            ),
            versions=escape(", ".join(f"{name} {text}" for name, text in versions().items())),
        )
    )


def summary(results: list[ScopeResult]) -> str:
    """Says in words how well each scope segments and how fast, from best to worst."""
    ranked = sorted(results, key=lambda result: result.quality.mean_ious[-1], reverse=True)
    return f"Mean IoU on held-out scenes: {'; '.join(_in_words(result) for result in ranked)}."


def _in_words(result: ScopeResult) -> str:
    arrangement = result.arrangement
    return (
        f"{result.quality.mean_ious[-1]:.3f} with {arrangement.scope}, statistics over "
        f"{arrangement.norm_batch_size} images, at {result.speed.images_per_second:.0f} images/s"
    )


def _html_table(runs: list[Run]) -> str:
    """Turns the terminal's table on its side: a column a scope fits a phone."""
    columns = [HEADINGS, *(_cells(run.result) for run in runs)]
    rows = [
        f"<tr><th>{escape(heading)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for heading, *cells in zip(*columns, strict=True)
    ]
    return f'<table class="figures">{"".join(rows)}</table>'


def _legend(runs: list[Run]) -> str:
    key = '<svg viewBox="0 0 24 10"><line class="series-{}" x1="0" x2="24" y1="5" y2="5"/></svg>'
    return "".join(
        f"<span>{key.format(i)}{escape(run.result.arrangement.scope)}, "
        f"{run.result.arrangement.norm_batch_size} images per norm batch</span>"
        for i, run in enumerate(runs)
    )


def _iou_series(run: Run) -> Series:
    quality = run.result.quality
    steps = [float(step) for step in quality.evaluated_steps]
    return Series(run.result.arrangement.scope, list(zip(steps, quality.mean_ious, strict=True)))


def _loss_series(run: Run) -> Series:
    losses = run.result.quality.losses
    window = _loss_window(len(losses))
    means = [
        (float(start + window), float(np.mean(losses[start : start + window])))
        for start in range(0, len(losses) - window + 1, window)
    ]
    return Series(run.result.arrangement.scope, means)


def _loss_window(steps: int) -> int:
    return max(1, steps // LOSS_POINTS)


def _loss_point(window: int) -> str:
    return "each point one step" if window == 1 else f"each point the mean of {window} steps"


def _comparisons(comparisons: list[Comparison]) -> str:
    if not comparisons:
        return "<p>No scope was trained on several ranks: nothing to compare.</p>"
    return "".join(
        f'<p class="{"passed" if comparison.passed else "failed"}">{escape(str(comparison))}</p>'
        for comparison in comparisons
    )


def _pictures(report: Report) -> str:
    names = ["input", "truth", *(run.result.arrangement.scope for run in report.runs)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    palette = _palette(len(report.class_names))
    rows = []
    for i in range(len(report.runs[0].predictions)):
        masks = [report.held_out.masks[i].numpy(), *(run.predictions[i] for run in report.runs)]
        pictures = [
            _photograph(report.held_out.images[i].numpy()),
            *(palette[mask] for mask in masks),
        ]
        cells = "".join(
            f'<td><img alt="{escape(name)}, scene {i + 1}" src="{_png(picture)}"></td>'
            for name, picture in zip(names, pictures, strict=True)
        )
        rows.append(f"<tr>{cells}</tr>")
    return f'<table class="pictures"><tr>{head}</tr>{"".join(rows)}</table>'


def _classes(names: tuple[str, ...]) -> str:
    palette = _palette(len(names))
    return "".join(
        f'<span><i style="background:#{bytes(palette[i]).hex()}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )


def _palette(class_count: int) -> npt.NDArray[np.uint8]:
    """Colours [VOID + 1, 3]: dark background, then hues a golden angle apart, void white."""
    colours = np.full((VOID + 1, 3), 255, np.uint8)
    colours[0] = 38
    for i in range(1, class_count):
        hue, value = (i * 0.618034) % 1.0, (0.95, 0.7)[i % 2]
        colours[i] = [round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.65, value)]
    return colours


def _photograph(image: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Turns [3, side, side] into 8-bit pixels; light beyond the range of a screen is cut off."""
    pixels: npt.NDArray[np.uint8] = (image * 255).round().clip(0, 255).astype(np.uint8)
    return np.moveaxis(pixels, 0, -1)


def _png(pixels: npt.NDArray[np.uint8]) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
