# SPDX-License-Identifier: Apache-2.0
"""Tells what the scopes did: a table, metrics.json, and report.html, one file without links."""

from __future__ import annotations

import base64
import colorsys
import io
import json
import platform
import statistics
import string
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

import normscope
from check import Comparison
from scenes import VOID, Batch
from settings import Settings
from train import Training
from trainer import ESTIMATION_BATCHES

# Points of a loss curve; more would draw noise.
LOSS_POINTS = 40


@dataclass(frozen=True)
class Spread:
    """A number that each seed gave: the mean, and the standard deviation where there are several.

    Example:
        >>> f"{Spread.of([0.5, 0.6]):.3f}", f"{Spread.of([0.5]):.3f}"
        ('0.550 ± 0.071', '0.500')
    """

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Over at least one value; the deviation divides by their number less one."""
        return cls(statistics.fmean(values), statistics.stdev(values) if values[1:] else None)

    def __format__(self, specification: str) -> str:
        parts = [self.mean] if self.deviation is None else [self.mean, self.deviation]
        return " ± ".join(format(part, specification) for part in parts)


class Outcome:
    """All trainings of one scope, and the spread of what each of them gave."""

    def __init__(self, trainings: list[Training]) -> None:
        self.trainings = trainings
        self.first = trainings[0]
        self.scope = self.first.scope
        self.mean_iou = Spread.of([training.mean_ious[-1] for training in trainings])
        self.seconds = Spread.of([training.seconds for training in trainings])
        self.synchronization_share = Spread.of([each.synchronization_share for each in trainings])
        self.norm_batch_sizes = ", ".join(self.first.norm_batch_sizes)

    def columns(self) -> dict[str, str]:
        """What the table says of the scope."""
        return {
            "scope": self.scope,
            "processes": str(self.first.processes),
            "images per norm batch": self.norm_batch_sizes,
            "mean IoU": f"{self.mean_iou:.3f}",
            "training time": f"{self.seconds:.0f} s",
            "synchronizing": f"{self.synchronization_share:.0%}",
            "exchanges per step": f"{self.first.exchanges_per_step:.1f}",
            "bytes per step": f"{self.first.bytes_per_step:,.0f}",
        }

    def schedule(self) -> str:
        """The scopes in words, with the steps at which they begin, where they change."""
        stages = ", ".join(f"{scope} from step {step}" for step, scope in self.first.stages.items())
        return f"{self.scope}: {stages}" if len(self.first.stages) > 1 else ""

    def metrics(self) -> dict[str, object]:
        """What a program may want to read: the spreads, and what each seed gave."""
        trainings = [dict(vars(training)) for training in self.trainings]
        for training in trainings:
            del training["predictions"]
            plan = training.pop("plan")
            if plan is not None:
                training["scopes"] = {layer: str(scope) for layer, scope in plan.scopes.items()}
        return {
            "processes": self.first.processes,
            "mean_iou": vars(self.mean_iou),
            "seconds": vars(self.seconds),
            "synchronization_share": vars(self.synchronization_share),
            "exchanges_per_step": self.first.exchanges_per_step,
            "bytes_per_step": self.first.bytes_per_step,
            "trainings": trainings,
        }


class Report:
    """Everything there is to tell."""

    def __init__(
        self,
        settings: Settings,
        class_names: tuple[str, ...],
        held_out: Batch,
        comparisons: list[Comparison],
        trainings: list[Training],
    ) -> None:
        self._settings, self._comparisons = settings, comparisons
        self._class_names, self._held_out = class_names, held_out
        self._outcomes = [
            Outcome([training for training in trainings if training.scope == scope])
            for scope in dict.fromkeys(training.scope for training in trainings)
        ]

    def table(self) -> str:
        """Formats the comparison for a terminal; below it, the schedules of scopes that change."""
        cells = [outcome.columns() for outcome in self._outcomes]
        rows = [list(cells[0]), *(list(each.values()) for each in cells)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        schedules = [outcome.schedule() for outcome in self._outcomes]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *filter(None, schedules)])

    def save(self, folder: Path, command: str) -> None:
        """Writes metrics.json and report.html."""
        metrics = {
            "settings": vars(self._settings),
            "versions": _versions(),
            "check": [vars(comparison) for comparison in self._comparisons],
            "scopes": {outcome.scope: outcome.metrics() for outcome in self._outcomes},
        }
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2, default=str) + "\n")
        (folder / "report.html").write_text(self._page(command))

    def _page(self, command: str) -> str:
        cells = [outcome.columns() for outcome in self._outcomes]
        # On its side: a column a scope fits a phone.
        rows = [[heading, *(each[heading] for each in cells)] for heading in cells[0]]
        seeds = [training.seed for training in self._outcomes[0].trainings]
        template = string.Template(Path(__file__).with_name("report.template.html").read_text())
        return template.substitute(
            summary="; ".join(
                f"{each.mean_iou:.3f} with {each.scope} ({each.norm_batch_sizes} images)"
                for each in sorted(self._outcomes, key=lambda outcome: -outcome.mean_iou.mean)
            ),
            table="".join(f"<tr><td>{'<td>'.join(row)}" for row in rows),
            schedules="<br>".join(filter(None, (each.schedule() for each in self._outcomes))),
            held_out=len(self._held_out.masks),
            estimated_from=ESTIMATION_BATCHES * self._settings.global_batch,
            seeds=f"{len(seeds)} seeds from {seeds[0]} on" if seeds[1:] else f"seed {seeds[0]}",
            costs=_embedded(_draw_costs(self._outcomes), "svg"),
            plan=self._plan(),
            learning=_embedded(_draw_learning(self._outcomes), "svg"),
            predictions=_embedded(self._draw_predictions(), "png"),
            comparisons="".join(f"<p>{comparison}</p>" for comparison in self._comparisons)
            or "<p>No scope was trained on several ranks: nothing to compare.</p>",
            command=escape(command),
            versions=", ".join(f"{name} {text}" for name, text in _versions().items()),
        )

    def _plan(self) -> str:
        plans = [outcome.first.plan for outcome in self._outcomes if outcome.first.plan]
        return (
            _embedded(_draw_plan(plans[0]), "svg") if plans else "<p>No scope was recommended.</p>"
        )

    def _draw_predictions(self) -> Figure:
        """The first held-out scenes, row by row; a column each for input, truth and scopes."""
        predicted = {outcome.scope: outcome.first.predictions for outcome in self._outcomes}
        masks = {"truth": self._held_out.masks, **predicted}
        scenes = range(len(next(iter(predicted.values()))))
        figure = Figure((1.5 * (len(masks) + 1), 1.6 * len(scenes) + 0.5), layout="constrained")
        grid = figure.subplots(len(scenes), len(masks) + 1, squeeze=False)
        for scene, (photograph, *row) in zip(scenes, grid, strict=True):
            photograph.imshow(self._held_out.images[scene].permute(1, 2, 0).clamp(0, 1).numpy())
            photograph.set_title("input" if scene == 0 else "")
            for axes, (name, mask) in zip(row, masks.items(), strict=True):
                shown = axes.imshow(mask[scene].numpy(), **_colours(len(self._class_names)))
                axes.set_title(name if scene == 0 else "")
        for axes in grid.flat:
            axes.set_axis_off()
        bar = figure.colorbar(shown, ax=grid, orientation="horizontal", aspect=60)
        bar.set_ticks(range(len(self._class_names)), labels=self._class_names)
        return figure


def _colours(classes: int) -> dict[str, Any]:
    """Background dark, void white, and a hue for each class between them."""
    hues = (colorsys.hsv_to_rgb(i * 0.618034 % 1.0, 0.7, 0.95) for i in range(1, classes))
    bounds = [*(i - 0.5 for i in range(classes + 1)), VOID + 0.5]
    colours = ListedColormap([(0.15, 0.15, 0.15), *hues, (1.0, 1.0, 1.0)])
    return {"cmap": colours, "norm": BoundaryNorm(bounds, classes + 1)}


def _draw_costs(outcomes: list[Outcome]) -> Figure:
    """Mean IoU against bytes and against time; bars are one standard deviation of a seed."""
    figure = Figure((10, 4), layout="constrained")
    of_bytes, of_time = figure.subplots(1, 2, sharey=True)
    for outcome in outcomes:
        iou, seconds = outcome.mean_iou, outcome.seconds
        style = {"yerr": iou.deviation, "fmt": "o", "label": outcome.scope, "capsize": 3}
        of_bytes.errorbar(outcome.first.bytes_per_step / 1000, iou.mean, **style)
        of_time.errorbar(seconds.mean, iou.mean, xerr=seconds.deviation, **style)
    for axes in (of_bytes, of_time):
        axes.update_datalim([(0, 0)])
        axes.autoscale_view()
    of_bytes.set(xlabel="kB that a rank sends per step", ylabel="mean IoU")
    of_time.set(xlabel="seconds of training")
    of_time.legend(loc="lower left")
    return figure


def _draw_plan(plan: normscope.ScopePlan) -> Figure:
    """What each layer's norm batch is worth, under local and under the scope that it gets."""
    figure = Figure((10, 0.35 * len(plan.layers) + 1), layout="constrained")
    axes = figure.subplots()
    for row, layer in enumerate(plan.layers):
        local, chosen = layer.candidates[0].values, layer.chosen.values
        if local is None or chosen is None:
            continue
        reach = [[chosen.value - chosen.lower], [chosen.upper - chosen.value]]
        colour = "tab:red" if layer.spans_ranks else "tab:blue"
        axes.plot([local.value, chosen.value], [row, row], color=colour, linewidth=1)
        axes.plot(local.value, row, "o", color="tab:blue")
        axes.errorbar(chosen.value, row, xerr=reach, fmt="s", color=colour, capsize=3)
        axes.annotate(layer.scope, (chosen.upper, row), (6, -4), textcoords="offset points")
    axes.axvline(plan.independent_values, color="black", linewidth=1)
    names = [f"{layer.layer} ({layer.channels})" for layer in plan.layers]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="independent values that a norm batch is worth; wanted: the line")
    axes.margins(x=0.15)
    return figure


def _draw_learning(outcomes: list[Outcome]) -> Figure:
    """Mean IoU and loss over the steps, means over the seeds."""
    figure = Figure((10, 4), layout="constrained")
    of_iou, of_loss = figure.subplots(1, 2)
    for outcome in outcomes:
        ious = np.mean([training.mean_ious for training in outcome.trainings], axis=0)
        of_iou.plot(outcome.first.evaluated_steps, ious, "o-", label=outcome.scope)
        losses = np.mean([training.losses for training in outcome.trainings], axis=0)
        window = max(1, len(losses) // LOSS_POINTS)
        ends = range(window, len(losses) + 1, window)
        of_loss.plot(ends, [losses[end - window : end].mean() for end in ends])
    of_iou.set(xlabel="step", ylabel="mean IoU on held-out scenes", ylim=(0, None))
    of_loss.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    of_iou.legend()
    return figure


def _embedded(figure: Figure, kind: str) -> str:
    """The figure as an element of the page; the same one from the same figures."""
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope"}):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=110, metadata=metadata, bbox_inches="tight")
    mime = {"svg": "svg+xml", "png": "png"}[kind]
    return f'<img src="data:image/{mime};base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _versions() -> dict[str, str]:
    """What the numbers were made with."""
    ours = {"normscope": normscope.__version__, "torch": torch.__version__}
    return {**ours, "python": platform.python_version(), "machine": platform.machine()}
