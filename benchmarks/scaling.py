# SPDX-License-Identifier: Apache-2.0
"""Predicts what scopes cost for 2 to 10 000 ranks, and draws it.

The network is a DeepLabv3 with a ResNet-50, with a given step time, or that of a plan.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

import models
from normscope import ScopePlan
from normscope.costs import Costs, Prediction, predict

RANKS_PER_HOST = 8
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 10_000)
TABLE_SIZES = (8, 64, 1000, 10_000)
STEP_SECONDS = 0.3

# The layer after the global pooling of DeepLabv3.
IMAGE_LEVEL = "1.image.2"

Layers = list[tuple[str, int, str]]  # names, channels and scopes


@dataclass(frozen=True)
class Curve:
    """A way to share statistics.

    Args:
        label: Name in the picture and the table.
        scope: Scope of the layers; None for the scopes of the plan.
        least: Smallest number of ranks to show.
        layer: The only layer that has the scope; None for all. The others have local.
    """

    label: str
    scope: str | None
    least: int = 2
    layer: str | None = None


CURVES = (
    Curve("world", "world"),
    Curve("group:32", "group:32", 32),
    Curve("node", "node"),
    Curve("group:2", "group:2"),
    Curve("group:4 in one layer", "group:4", 4, IMAGE_LEVEL),
    Curve("local", "local"),
)
CURVES_OF_A_PLAN = (*CURVES[:4], Curve("the plan", None), CURVES[-1])


def layers_of_deeplab() -> Layers:
    """Return the layers of DeepLabv3."""
    layers = models.deeplab().named_modules()
    return [
        (name, layer.num_features, "local")
        for name, layer in layers
        if isinstance(layer, torch.nn.BatchNorm2d)
    ]


def with_scope(layers: Layers, curve: Curve) -> Layers:
    """Return the layers with the scope of a curve."""
    if curve.scope is None:
        return layers
    return [
        (name, channels, curve.scope if curve.layer in (None, name) else "local")
        for name, channels, _ in layers
    ]


def predict_curve(
    curve: Curve, layers: Layers, costs: Costs, ranks: int, step_time: float
) -> Prediction:
    """Predict the cost of a step for a number of ranks, up to eight of them on a host."""
    return predict(
        with_scope(layers, curve),
        hosts=-(-ranks // RANKS_PER_HOST),
        ranks_per_host=min(ranks, RANKS_PER_HOST),
        costs=costs,
        step_time=step_time,
    )


def table(curves: Sequence[Curve], layers: Layers, costs: Costs, step_time: float) -> str:
    """Return a table of milliseconds and shares of a step, with a row per curve."""
    lines = [f"{'milliseconds of a step (share)':30}" + "".join(f"{n:>18,}" for n in TABLE_SIZES)]
    for curve in curves:
        cells = []
        for ranks in TABLE_SIZES:
            if ranks < curve.least:
                cells.append(f"{'':18}")
                continue
            prediction = predict_curve(curve, layers, costs, ranks, step_time)
            milliseconds = prediction.seconds * 1e3
            number = f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
            cells.append(f"{f'{number} ({prediction.share:.1%})':>18}")
        lines.append(f"{curve.label:30}{''.join(cells)}")
    return "\n".join(lines)


def draw(
    path: Path, curves: Sequence[Curve], layers: Layers, costs: Costs, step_time: float
) -> None:
    """Write a picture of the times and of their shares of a step."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    times, shares = figure.subplots(1, 2, sharex=True)
    for number, curve in enumerate(curves):
        ranks = [ranks for ranks in SIZES if ranks >= curve.least]
        found = [predict_curve(curve, layers, costs, each, step_time) for each in ranks]
        style = {"color": f"C{number}", "linewidth": 1, "label": curve.label}
        if any(each.seconds for each in found):
            times.plot(ranks, [each.seconds * 1e3 for each in found], ".-", **style)
        shares.plot(ranks, [each.share for each in found], ".-", **style)
    for axes in (times, shares):
        axes.set_xscale("log")
        axes.set_xlabel(f"ranks, {RANKS_PER_HOST} on a host")
        axes.grid(color="#dddddd", linewidth=0.5)
    times.set_yscale("log")
    times.set_ylabel("milliseconds of a step in exchanges")
    shares.set_ylim(-0.02, 1)
    shares.set_ylabel(f"share of a step of {step_time * 1e3:.0f} ms without them")
    shares.legend(loc="upper left", fontsize=7)
    figure.suptitle(costs.source, fontsize=10)
    # Write text as text, not as outlines, and the same file for the same data.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "normscope"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--costs",
        type=Path,
        help="a file from `python -m normscope measure`; default: an assumed Ethernet",
    )
    parser.add_argument(
        "--plan", type=Path, help="a file from ScopePlan.save; default: one layer of DeepLabv3"
    )
    parser.add_argument(
        "--step-time", type=float, default=STEP_SECONDS, help="seconds without exchanges"
    )
    parser.add_argument("--plot", type=Path, help="a .svg or .png file")
    chosen = parser.parse_args(arguments)
    costs = Costs.load(chosen.costs) if chosen.costs else Costs.ethernet_25g()
    curves, layers = CURVES, layers_of_deeplab()
    if chosen.plan:
        curves = CURVES_OF_A_PLAN
        plan = ScopePlan.load(chosen.plan)
        layers = [(layer.layer, layer.channels, layer.scope) for layer in plan.layers]
    print(f"{len(layers)} layers\n\n{costs}\n\n{table(curves, layers, costs, chosen.step_time)}")
    if chosen.plot is not None:
        draw(chosen.plot, curves, layers, costs, chosen.step_time)


if __name__ == "__main__":
    main()
