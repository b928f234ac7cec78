# SPDX-License-Identifier: Apache-2.0
"""Prints the criteria of the rules for each layer, and the loss if only this layer is narrow."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from scope_results import Result
from scope_rules import apply, loss_changes, noise, plan_of
from scope_tasks import make_task

# At the initial weights, and after a part of the training under world.
MEASURED_BEFORE_STEPS = (0, 100)


def layer_table(task_name: str, seeds: Iterable[int], known: Iterable[Result]) -> str:
    """Return a table of means over the seeds, and their deviations.

    Args:
        task_name: The network.
        seeds: The seeds to measure.
        known: Results of trainings; those under `all-but:LAYER` and `world` give the lost quality.
    """
    worth: dict[str, list[float]] = {}
    changes: dict[tuple[str, int], list[float]] = {}
    for seed in seeds:
        task = make_task(task_name, seed)
        layers = plan_of(task).layers
        apply(task.model, {layer.layer: "world" for layer in layers})
        for layer in layers:
            worth.setdefault(layer.layer, []).append(2 / noise(layer))
        for step in range(max(MEASURED_BEFORE_STEPS) + 1):
            if step in MEASURED_BEFORE_STEPS:
                for name, change in loss_changes(task).items():
                    changes.setdefault((name, step), []).append(change)
            task.step(step)
    of_world = _quality_of_world(task_name, known)
    measured = (f"loss at step {step}" for step in MEASURED_BEFORE_STEPS)
    rows = [(task_name, "worth", *measured, "of world")]
    for name, values in worth.items():
        cells = (_mean_and_spread(changes[name, step]) for step in MEASURED_BEFORE_STEPS)
        ratio = f"{of_world[name]:.3f}" if name in of_world else "?"
        rows.append((name, f"{statistics.fmean(values):.1f}", *cells, ratio))
    return "\n".join(
        f"{name:18}{value:>8}" + "".join(f"{cell:>20}" for cell in cells) + f"{ratio:>10}"
        for name, value, *cells, ratio in rows
    )


def _quality_of_world(task_name: str, known: Iterable[Result]) -> dict[str, float]:
    """Return the mean ratio of the quality to that of world, by the layer that was narrow."""
    of_task = [one for one in known if one.task == task_name and one.processes == 1]
    world = {one.seed: one.quality for one in of_task if one.scopes == "world"}
    ratios: dict[str, list[float]] = {}
    for one in of_task:
        which, _, layer = one.scopes.partition(":")
        if which == "all-but" and one.seed in world:
            ratios.setdefault(layer, []).append(one.quality / world[one.seed])
    return {layer: statistics.fmean(of_layer) for layer, of_layer in ratios.items()}


def _mean_and_spread(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):+.4f} ± {spread:.4f}"
