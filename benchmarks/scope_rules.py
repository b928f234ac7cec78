# SPDX-License-Identifier: Apache-2.0
"""Rules that choose the scope of each layer, and when: plans, rules to compare, and schedules.

One process stands for four ranks of two images. Slices of its batch stand for the ranks: local is
slices:4, group:2 is slices:2, and world is local.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import normscope
from normscope.scopes import LayerPlan
from scope_tasks import RANKS, Task

BATCHES_OF_A_PLAN = 16

# The scopes in one process with the whole batch that correspond to scopes of four ranks.
IN_ONE_PROCESS = {"local": "slices:4", "group:2": "slices:2", "world": "local"}

Scopes = dict[str, str]

# Functions that choose the scopes of all layers, by the step before which they are called.
Schedule = dict[int, Callable[[Task], Scopes]]

_SPELLING = re.compile(
    r"""(?P<rule>noise|noise-per-byte|loss|random)(@(?P<step>\d+))?=(?P<budget>[\d.]+)(?P<share>%?)
    |(?P<wanted>[\d.]+)
    |(?P<which>only|all-but):(?P<layer>[\w.]+)""",
    re.VERBOSE,
)


def schedule_of(scopes: str, steps: int, seed: int = 0) -> Schedule:
    """Parse `scopes`.

    * `local`, `world`: the scope of every layer;
    * `progressive`: local, group:2 and world for a third of the steps each;
    * `4`: the plan of normscope.recommend_scopes for this many independent values;
    * `RULE=4`: `world` for the first layers by RULE (see `rank`), with as many exchanges as the
      plan for 4 (`noise-per-byte`: as many bytes); `RULE=25%`: with this share of those of world;
      `RULE@100=4`: `world` for all layers until step 100, when the rule is applied;
    * `only:LAYER`, `all-but:LAYER`: world in these layers.

    Raises:
        ValueError: If `scopes` is none of these.
    """
    if scopes in ("local", "world"):
        return {0: partial(_everywhere, scope=scopes)}
    if scopes == "progressive":
        parts = len(IN_ONE_PROCESS)
        return {
            i * steps // parts: partial(_everywhere, scope=scope)
            for i, scope in enumerate(IN_ONE_PROCESS)
        }
    spelling = _SPELLING.fullmatch(scopes)
    if spelling is None:
        raise ValueError(
            "scopes: expected local, world, progressive, a wanted number, RULE=BUDGET, only:LAYER "
            f"or all-but:LAYER, got {scopes!r}"
        )
    if spelling["which"]:
        return {0: lambda task: _but_one(task, spelling["layer"], spelling["which"])}
    if spelling["wanted"]:
        wanted = float(spelling["wanted"])
        return {0: lambda task: _scopes_of(plan_of(task, wanted))}
    budget = Budget(float(spelling["budget"]), is_percentage=bool(spelling["share"]))
    step = int(spelling["step"] or 0)
    asked_once: Schedule = {step: lambda task: within(task, spelling["rule"], budget, seed)}
    return asked_once if step == 0 else {0: partial(_everywhere, scope="world"), **asked_once}


def never_changes(scopes: str) -> bool:
    """Return whether the scopes are only chosen once, at the initial weights."""
    return len(schedule_of(scopes, len(IN_ONE_PROCESS))) == 1


def plan_of(task: Task, wanted: float = math.inf) -> normscope.ScopePlan:
    """Return the recommendation for ranks, which parts of the batches stand for."""
    batches = [task.images(step) for step in steps_of_a_plan(task)]
    return normscope.recommend_scopes(task.model, batches, wanted, ranks=RANKS)


def steps_of_a_plan(task: Task) -> range:
    """Return the steps whose batches are measured; they would follow the last training step."""
    return range(task.steps, task.steps + BATCHES_OF_A_PLAN)


@dataclass(frozen=True)
class Budget:
    """A budget: the cost of the plan for a wanted number, or a percentage of the cost of world."""

    number: float
    is_percentage: bool

    def of(self, task: Task, prices: Mapping[str, int]) -> float:
        """Return the budget in the unit of the prices."""
        if self.is_percentage:
            return self.number / 100 * sum(prices.values())
        plan = plan_of(task, self.number)
        return sum(prices[layer.layer] for layer in plan.layers if layer.spans_ranks)


def within(task: Task, rule: str, budget: Budget, seed: int) -> Scopes:
    """Choose world for the first layers by the rule, as far as the budget allows."""
    prices = {
        layer.layer: layer.exchange_bytes if rule == "noise-per-byte" else 1
        for layer in plan_of(task).layers
    }
    worth = rank(task, rule, seed)
    order = sorted(prices, key=lambda layer: worth[layer] / prices[layer], reverse=True)
    wide = affordable(order, prices, budget.of(task, prices))
    return {layer: "world" if layer in wide else "local" for layer in prices}


def affordable(order: Iterable[str], prices: Mapping[str, int], budget: float) -> set[str]:
    """Take the layers in order, and skip those that exceed the remaining budget."""
    bought = set()
    for layer in order:
        if prices[layer] <= budget:
            bought.add(layer)
            budget -= prices[layer]
    return bought


def rank(task: Task, rule: str, seed: int) -> dict[str, float]:
    """Return how much each layer needs a wide scope.

    * `noise`, `noise-per-byte`: the squared relative error of its variances under local;
    * `loss`: the increase of the training loss if only this layer is narrow;
    * `random`: a random number.
    """
    layers = plan_of(task).layers
    if rule == "loss":
        return loss_changes(task)
    if rule == "random":
        lots = np.random.default_rng(seed).random(len(layers))
        return {layer.layer: float(lot) for layer, lot in zip(layers, lots, strict=True)}
    return {layer.layer: noise(layer) for layer in layers}


def noise(layer: LayerPlan) -> float:
    """Return the squared relative error of a layer's variances under local."""
    values = layer.candidates[0].values
    assert values is not None  # there are several parts
    return 2 / values.value


def loss_changes(task: Task) -> dict[str, float]:
    """Return the mean change of the training loss if only one layer is narrow, for each layer."""
    model = copy.deepcopy(task.model).train()
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, normscope.BatchNorm)
    }
    changes = {}
    with torch.no_grad():
        for layer in layers.values():
            layer.scope = normscope.Scope(IN_ONE_PROCESS["world"])
        wide = _mean_loss(task, model)
        for name, layer in layers.items():
            layer.scope = normscope.Scope(IN_ONE_PROCESS["local"])
            changes[name] = _mean_loss(task, model) - wide
            layer.scope = normscope.Scope(IN_ONE_PROCESS["world"])
    return changes


def _mean_loss(task: Task, model: torch.nn.Module) -> float:
    losses = [task.loss(model, step).double() for step in steps_of_a_plan(task)]
    return float(torch.stack(losses).mean())


def apply(model: torch.nn.Module, scopes: Scopes) -> None:
    """Give the layers the scopes that stand for these scopes in one process."""
    layers = dict(model.named_modules())
    for name, scope in scopes.items():
        layer = layers[name]
        assert isinstance(layer, normscope.BatchNorm)
        layer.scope = normscope.Scope(IN_ONE_PROCESS[scope])


def _scopes_of(plan: normscope.ScopePlan) -> Scopes:
    return {layer: str(scope) for layer, scope in plan.scopes.items()}


def _everywhere(task: Task, scope: str) -> Scopes:
    return dict.fromkeys(plan_of(task).scopes, scope)


def _but_one(task: Task, one: str, which: str) -> Scopes:
    """Choose world for one layer only, or for all but one."""
    layers = list(plan_of(task).scopes)
    if one not in layers:
        raise ValueError(f"scopes: expected one of {', '.join(layers)} after {which}:, got {one}")
    return {layer: "world" if (layer == one) == (which == "only") else "local" for layer in layers}
