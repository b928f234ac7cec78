# SPDX-License-Identifier: Apache-2.0
"""Predicts what scopes cost for 2 to 10 000 ranks, and draws it.

The network is a DeepLabv3 with a ResNet-50, with a given step time. Its plan of scopes is what
recommend_scopes finds on four ranks with two images each. With more ranks, a layer that needs four
of them gets group:4.
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
import normscope
from normscope import ScopePlan
from normscope.costs import Costs, Prediction, predict
from scope_tasks import RANKS, make_task

RANKS_PER_HOST = 8
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 10_000)
TABLE_SIZES = (8, 64, 1000, 10_000)
BATCHES = 8
STEP_SECONDS = 0.3


@dataclass(frozen=True)
class Curve:
    """A way to share statistics.

    Args:
        label: Name in the picture and the table.
        scope: Scope of all layers; None for the scopes of the plan.
        least: Smallest number of ranks to show.
    """

    label: str
    scope: str | None
    least: int = 2


CURVES = (
    Curve("world", "world"),
    Curve("group:32", "group:32", 32),
    Curve("node", "node"),
    Curve("group:2", "group:2"),
    Curve("recommended", None, RANKS),
    Curve("local", "local"),
)


def plan_of_deeplab() -> ScopePlan:
    """Return what recommend_scopes finds on the scenes of the demo, with initial weights."""
    torch.manual_seed(0)
    model = normscope.convert(models.deeplab())
    task = make_task("segmentation", seed=0)
    batches = [task.images(step) for step in range(BATCHES)]
    return normscope.recommend_scopes(model, batches, ranks=RANKS)


def layers_of(plan: ScopePlan, scope: str | None) -> list[tuple[str, int, str]]:
    """Return the layers, all with one scope, or with the scopes of the plan if it is None."""
    return [
        (layer.layer, layer.channels, scope or _by_ranks(layer.chosen.ranks))
        for layer in plan.layers
    ]


def _by_ranks(ranks: int) -> str:
    return "local" if ranks == 1 else f"group:{ranks}"


def predict_curve(
    curve: Curve, plan: ScopePlan, costs: Costs, ranks: int, step_time: float
) -> Prediction:
    """Predict the cost of a step for a number of ranks, up to eight of them on a host."""
    return predict(
        layers_of(plan, curve.scope),
        hosts=-(-ranks // RANKS_PER_HOST),
        ranks_per_host=min(ranks, RANKS_PER_HOST),
        costs=costs,
        step_time=step_time,
    )


def table(plan: ScopePlan, costs: Costs, step_time: float) -> str:
    """Return a table of milliseconds and shares of a step, with a row per curve."""
    lines = [f"{'milliseconds of a step (share)':30}" + "".join(f"{n:>18,}" for n in TABLE_SIZES)]
    for curve in CURVES:
        cells = []
        for ranks in TABLE_SIZES:
            if ranks < curve.least:
                cells.append(f"{'':18}")
                continue
            prediction = predict_curve(curve, plan, costs, ranks, step_time)
            milliseconds = prediction.seconds * 1e3
            number = f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
            cells.append(f"{f'{number} ({prediction.share:.1%})':>18}")
        lines.append(f"{curve.label:30}{''.join(cells)}")
    return "\n".join(lines)


def draw(path: Path, plan: ScopePlan, costs: Costs, step_time: float) -> None:
    """Write a picture of the times and of their shares of a step."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    times, shares = figure.subplots(1, 2, sharex=True)
    for number, curve in enumerate(CURVES):
        ranks = [ranks for ranks in SIZES if ranks >= curve.least]
        found = [predict_curve(curve, plan, costs, each, step_time) for each in ranks]
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
        "--plan", type=Path, help="a file from ScopePlan.save; default: DeepLabv3's plan"
    )
    parser.add_argument(
        "--step-time", type=float, default=STEP_SECONDS, help="seconds without exchanges"
    )
    parser.add_argument("--plot", type=Path, help="a .svg or .png file")
    chosen = parser.parse_args(arguments)
    costs = Costs.load(chosen.costs) if chosen.costs else Costs.ethernet_25g()
    plan = ScopePlan.load(chosen.plan) if chosen.plan else plan_of_deeplab()
    noisy = [layer.layer for layer in plan.layers if layer.chosen.ranks > 1]
    print(f"{len(plan.layers)} layers, of which the plan synchronizes {', '.join(noisy) or 'none'}")
    print(f"\n{costs}\n\n{table(plan, costs, chosen.step_time)}")
    if chosen.plot is not None:
        draw(chosen.plot, plan, costs, chosen.step_time)


if __name__ == "__main__":
    main()
