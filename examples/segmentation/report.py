# SPDX-License-Identifier: Apache-2.0
"""Reports the results of the scopes: a table, metrics.json, and a self-contained report.html."""

from __future__ import annotations

import base64
import html
import io
import json
import string
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, hsv_to_rgb
from matplotlib.figure import Figure

import normscope
from scenes import VOID, Batch, SceneSource
from settings import Settings
from trainer import ESTIMATION_BATCHES, Training

# Points in a loss curve; more would only show noise.
LOSS_POINTS = 40

# Layers in parallel branches of the network.
BRANCHES = ("atrous.", "image_level.")

# For each scope, one training per seed.
Trainings: TypeAlias = dict[str, list[Training]]

Metrics: TypeAlias = dict[str, Any]


def write_report(
    folder: Path, command: str, settings: Settings, source: SceneSource, trainings: Trainings
) -> str:
    """Writes metrics.json and report.html; returns a table for a terminal."""
    held_out = Batch.of(source.held_out_scenes())
    metrics = {scope: metrics_of(settings, each) for scope, each in trainings.items()}
    versions = {"normscope": normscope.__version__, "torch": torch.__version__}
    everything = {"settings": vars(settings), "versions": versions, "scopes": metrics}
    (folder / "metrics.json").write_text(json.dumps(everything, indent=2, default=str) + "\n")
    rows = [cells(of_scope) for of_scope in metrics.values()]
    # Transposed: with a column for each scope, the table fits on a phone.
    table = [[name, *(row[name] for row in rows)] for name in rows[0]]
    schedules = [
        f"{scope}: "
        + ", ".join(
            f"{stage.replace(' ', ' and ')} from step {step}"
            for step, stage in first.stages.items()
        )
        for scope, (first, *_) in trainings.items()
        if len(first.stages) > 1
    ]
    plans = [each[0].plan for each in trainings.values() if each[0].plan]
    template = string.Template(Path(__file__).with_name("report.template.html").read_text())
    page = template.substitute(
        table="".join(f"<tr><td>{'<td>'.join(row)}" for row in table),
        schedules="<br>".join(schedules),
        held_out=len(held_out.masks),
        estimated_from=ESTIMATION_BATCHES * settings.global_batch,
        results=embedded(
            draw_results(trainings, metrics), "mean IoU against bytes, time and steps, and the loss"
        ),
        plan=embedded(draw_plan(plans[0]), "the network, with the noise and scope of each layer")
        if plans
        else "<p>No scope was recommended.</p>",
        predictions=embedded(
            draw_predictions(trainings, held_out, source.class_names),
            "scenes, their truth, and the prediction under each scope",
        ),
        command=html.escape(command),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
    )
    (folder / "report.html").write_text(page)
    return "\n".join([*lines_of(rows), *schedules])


def metrics_of(settings: Settings, trainings: list[Training]) -> Metrics:
    """Collects the metrics of a scope: statistics over the seeds, and each training."""
    first = trainings[0]
    scopes = " ".join(first.stages.values()).split()
    unwanted = {"plan", "predictions"}
    return {
        "scope": first.scope,
        "processes": first.processes,
        "images_per_norm_batch": sorted({settings.norm_batch_size(scope) for scope in scopes}),
        "seeds": [training.seed for training in trainings],
        "mean_iou": spread([training.mean_ious[-1] for training in trainings]),
        "seconds": spread([training.seconds for training in trainings]),
        "synchronization_share": spread([each.synchronization_share for each in trainings]),
        "exchanges_per_step": first.exchanges_per_step,
        "bytes_per_step": first.bytes_per_step,
        "trainings": [
            {name: value for name, value in vars(each).items() if name not in unwanted}
            | ({"scopes": each.plan.scopes} if each.plan else {})
            for each in trainings
        ],
    }


def spread(values: list[float]) -> dict[str, float | None]:
    """Computes the mean over the seeds, and the standard deviation if there are several."""
    return {"mean": fmean(values), "deviation": stdev(values) if len(values) > 1 else None}


def cells(metrics: Metrics) -> dict[str, str]:
    """Formats the metrics of a scope for a table, with their units."""
    iou, seconds = metrics["mean_iou"], metrics["seconds"]
    return {
        "scope": metrics["scope"],
        "images per\nnorm batch": ", ".join(map(str, metrics["images_per_norm_batch"])),
        "mean IoU": told(iou, ".3f"),
        "training": f"{told(seconds, '.0f')} s",
        "exchanges\nper step": f"{metrics['exchanges_per_step']:.3g}",
        "time\nin them": f"{100 * metrics['synchronization_share']['mean']:.0f} %",
        "sent\nper step": f"{metrics['bytes_per_step'] / 1000:.3g} kB",
    }


def told(spread: dict[str, float | None], form: str) -> str:
    """Formats a mean and, if there is one, its standard deviation."""
    return " ± ".join(format(value, form) for value in spread.values() if value is not None)


def lines_of(rows: list[dict[str, str]]) -> list[str]:
    """Lays rows out in columns, at most 80 characters wide; headings take two lines."""
    headings = [name.partition("\n") for name in rows[0]]
    table = [
        [first for first, _, _ in headings],
        [second for _, _, second in headings],
        *(list(row.values()) for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def draw_results(trainings: Trainings, metrics: dict[str, Metrics]) -> Figure:
    """Draws mean IoU against bytes, time and steps, and the loss; bars are standard deviations."""
    figure = Figure((10, 7.5), layout="constrained")
    (of_bytes, of_time), (of_step, of_loss) = figure.subplots(2, 2)
    for scope, each in trainings.items():
        iou, seconds = metrics[scope]["mean_iou"], metrics[scope]["seconds"]
        style = {"yerr": iou["deviation"], "fmt": "o", "capsize": 3}
        of_bytes.errorbar(each[0].bytes_per_step / 1000, iou["mean"], label=scope, **style)
        of_time.errorbar(seconds["mean"], iou["mean"], xerr=seconds["deviation"], **style)
        ious = np.mean([training.mean_ious for training in each], axis=0)
        of_step.plot(each[0].evaluated_steps, ious, "o-")
        losses = np.mean([training.losses for training in each], axis=0)
        parts = np.array_split(losses, min(LOSS_POINTS, len(losses)))
        of_loss.plot(np.cumsum([len(part) for part in parts]), [part.mean() for part in parts])
    of_bytes.set(xlabel="kB that a rank sends per step", ylabel="mean IoU after the last step")
    of_time.set(xlabel="seconds of training", ylabel="mean IoU after the last step")
    of_step.set(xlabel="step", ylabel="mean IoU", ylim=(0, None))
    of_loss.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=len(trainings))
    return figure


def draw_plan(plan: normscope.ScopePlan) -> Figure:
    """Draws the network from left to right; noisy layers are red, synchronizing ones framed."""
    figure = Figure((13, 5.5), layout="constrained")
    axes = figure.subplots()
    # In percent of the variance of the outputs.
    colours = ScalarMappable(LogNorm(100 * plan.allowed / 50, 100 * plan.allowed * 2), "YlOrRd")
    before: list[tuple[int, float]] = []
    # Parallel branches share a column; every other layer has its own.
    columns = groupby(plan.layers, lambda layer: layer.layer.startswith(BRANCHES) or layer.layer)
    for x, (_, column) in enumerate(columns):
        layers = list(column)
        places = [(x, (len(layers) - 1) / 2 - y) for y in range(len(layers))]
        for line in product(before, places):
            axes.plot(*zip(*line, strict=True), color="grey", zorder=0)
        for place, layer in zip(places, layers, strict=True):
            local = layer.candidates[0]
            text = (
                f"{layer.layer}\n{layer.channels} channels\n{local.elements} elements\n"
                f"local: {100 * local.noise:.2g} %\n{layer.scope}"
            )
            colour = colours.to_rgba(np.array(100 * local.noise))
            width = 3 if layer.spans_ranks else 0.5
            box = {"boxstyle": "round", "facecolor": colour, "linewidth": width}
            ink = "white" if colour[1] < 0.2 else "black"  # green is low in dark red
            axes.text(*place, text, color=ink, bbox=box, ha="center", va="center", in_layout=False)
        before = places
    axes.set(xlim=(-0.5, x + 0.5), ylim=(-2, 2))
    axes.set_axis_off()
    bar = figure.colorbar(colours, ax=axes, orientation="horizontal", aspect=60, extend="both")
    bar.set_label(
        "noise that a layer adds with local, in % of the variance of the outputs; allowed for all "
        f"layers that stay narrow: {100 * plan.allowed:g} %"
    )
    bar.ax.xaxis.set_major_formatter("{x:g}")
    return figure


def draw_predictions(trainings: Trainings, held_out: Batch, class_names: Sequence[str]) -> Figure:
    """Draws the first held-out scenes in rows; the columns are input, truth and the scopes."""
    images, truth = held_out
    columns = {"truth": truth} | {scope: each[0].predictions for scope, each in trainings.items()}
    rows, classes = min(map(len, columns.values())), len(class_names)
    # The background is black. Neighbouring hues also differ in saturation.
    hsv = [(i / classes, 0.9 if i % 2 else 0.45, 0.95 if i else 0) for i in range(classes)]
    colours = ListedColormap(hsv_to_rgb(hsv))
    figure = Figure((1.5 * (len(columns) + 1), 1.6 * rows + 1), layout="compressed")
    grid = figure.subplots(rows, len(columns) + 1, squeeze=False)
    for row, (photograph, *others) in enumerate(grid):
        photograph.imshow(images[row].permute(1, 2, 0).clamp(0, 1).numpy())
        for axes, masks in zip(others, columns.values(), strict=True):
            known = np.ma.masked_equal(masks[row].numpy(), VOID)
            shown = axes.imshow(known, colours, vmin=-0.5, vmax=classes - 0.5)
    for axes, name in zip(grid[0], ["input", *columns], strict=True):
        axes.set_title(name)
    for axes in grid.flat:
        axes.set_axis_off()
    bar = figure.colorbar(shown, ax=grid, orientation="horizontal", aspect=60)
    every = 1 + classes // 20  # otherwise the labels overlap
    bar.set_ticks(range(0, classes, every), labels=class_names[::every])
    return figure


def embedded(figure: Figure, shows: str) -> str:
    """Returns the figure as an HTML element, with a text for those who cannot see it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{shows}" src="data:image/png;base64,{data}">'
