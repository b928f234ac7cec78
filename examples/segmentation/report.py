# SPDX-License-Identifier: Apache-2.0
"""Tells what the scopes did: metrics.json, and report.html, one file without links."""

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
from outcome_table import HEADINGS, cells, schedules, summary
from outcomes import Outcome, Spread
from point_chart import Mark, point_chart
from results import Comparison
from scenes import VOID, Batch
from settings import PROGRESSIVE, Settings
from training import ESTIMATION_BATCHES

# Points of a loss curve; more would draw noise.
LOSS_POINTS = 40


@dataclass(frozen=True)
class Report:
    """Everything there is to tell; every outcome predicted the first held-out scenes."""

    settings: Settings
    class_names: tuple[str, ...]
    held_out: Batch
    comparisons: list[Comparison]
    outcomes: list[Outcome]


def write_metrics(report: Report, path: Path) -> None:
    """Writes what a program may want to read. `quality` is the same for the same command."""
    metrics = {
        "settings": dataclasses.asdict(report.settings),
        "versions": versions(),
        "check": [dataclasses.asdict(comparison) for comparison in report.comparisons],
        "scopes": {outcome.scope: _metrics(outcome) for outcome in report.outcomes},
    }
    path.write_text(json.dumps(metrics, indent=2) + "\n")


def _metrics(outcome: Outcome) -> dict[str, object]:
    """Mean and standard deviation over the seeds, and what each seed gave."""
    spreads = {
        "mean_iou": outcome.mean_iou,
        "seconds": outcome.seconds,
        "images_per_second": outcome.images_per_second,
        "synchronization_share": outcome.synchronization_share,
    }
    return {
        "processes": outcome.arrangement.processes,
        **{name: dataclasses.asdict(spread) for name, spread in spreads.items()},
        "bytes_per_step": outcome.bytes_per_step,
        "trainings": [
            {
                "seed": training.seed,
                "stages": [dataclasses.asdict(stage) for stage in training.stages],
                "quality": dataclasses.asdict(training.quality),
                "speed": dataclasses.asdict(training.speed),
            }
            for training in outcome.trainings
        ],
    }


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
    settings, outcomes = report.settings, report.outcomes
    path.write_text(
        template.substitute(
            summary=escape(summary(outcomes)),
            table=_html_table(outcomes),
            schedules="".join(_schedule(schedule) for schedule in schedules(outcomes)),
            held_out=len(report.held_out.masks),
            estimated_from=ESTIMATION_BATCHES * settings.global_batch,
            seeds=escape(_about_seeds(settings.seeds)),
            legend=_legend(outcomes),
            bytes_chart=point_chart("kB sent per step", "mean IoU", _bytes_marks(outcomes)),
            time_chart=point_chart("seconds of training", "mean IoU", _time_marks(outcomes)),
            iou_chart=line_chart("step", "mean IoU", [_iou_series(each) for each in outcomes]),
            loss_chart=line_chart("step", "loss", [_loss_series(each) for each in outcomes]),
            loss_point=_loss_point(_loss_window(settings.steps)),
            classes=_classes(report.class_names),
            pictures=_pictures(report),
            comparisons=_comparisons(report.comparisons),
            command=escape(shlex.join(["python", *sys.argv])),
            setting=escape(
                f"{settings.ranks} ranks, {settings.images_per_rank} images per rank, "
                f"{settings.steps} steps, {_seeds(settings.seeds)}, {settings.device}"
            ),
            versions=escape(", ".join(f"{name} {text}" for name, text in versions().items())),
        )
    )


def _html_table(outcomes: list[Outcome]) -> str:
    """Turns the terminal's table on its side: a column a scope fits a phone."""
    columns = [HEADINGS, *(cells(outcome) for outcome in outcomes)]
    rows = [
        f"<tr><th>{escape(heading)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for heading, *row in zip(*columns, strict=True)
    ]
    return f'<table class="figures">{"".join(rows)}</table>'


def _schedule(schedule: str) -> str:
    return f'<p class="soft">{PROGRESSIVE.capitalize()}: {escape(schedule)}.</p>'


def _seeds(seeds: tuple[int, ...]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _about_seeds(seeds: tuple[int, ...]) -> str:
    if len(seeds) == 1:
        return "This is one seed; another gives other numbers."
    return (
        f"Figures and curves are means over {len(seeds)} seeds; after ± and as bars stands the "
        "standard deviation of one seed. Predictions are those of the first."
    )


def _bytes_marks(outcomes: list[Outcome]) -> list[Mark]:
    return [
        Mark(outcome.scope, Spread.of([outcome.bytes_per_step / 1000]), outcome.mean_iou)
        for outcome in outcomes
    ]


def _time_marks(outcomes: list[Outcome]) -> list[Mark]:
    return [Mark(outcome.scope, outcome.seconds, outcome.mean_iou) for outcome in outcomes]


def _legend(outcomes: list[Outcome]) -> str:
    key = '<svg viewBox="0 0 24 10"><line class="series-{}" x1="0" x2="24" y1="5" y2="5"/></svg>'
    return "".join(
        f"<span>{key.format(i)}{escape(outcome.scope)}, "
        f"{outcome.norm_batch_sizes} images per norm batch</span>"
        for i, outcome in enumerate(outcomes)
    )


def _iou_series(outcome: Outcome) -> Series:
    steps = [float(step) for step in outcome.trainings[0].quality.evaluated_steps]
    means = np.mean([training.quality.mean_ious for training in outcome.trainings], axis=0)
    return Series(outcome.scope, list(zip(steps, means.tolist(), strict=True)))


def _loss_series(outcome: Outcome) -> Series:
    losses = np.mean([training.quality.losses for training in outcome.trainings], axis=0)
    window = _loss_window(len(losses))
    means = [
        (float(start + window), float(losses[start : start + window].mean()))
        for start in range(0, len(losses) - window + 1, window)
    ]
    return Series(outcome.scope, means)


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
    names = ["input", "truth", *(outcome.scope for outcome in report.outcomes)]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    palette = _palette(len(report.class_names))
    rows = []
    for i in range(len(report.outcomes[0].predictions)):
        predictions = [outcome.predictions[i] for outcome in report.outcomes]
        masks = [report.held_out.masks[i].numpy(), *predictions]
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
