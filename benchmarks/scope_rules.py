# SPDX-License-Identifier: Apache-2.0
"""Rules that choose the scope of each layer, and when: plans, rules to compare, and schedules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import torch
from torch import nn

import normscope
from scope_measures import (
    gradient_noise,
    in_one_process,
    inverse_values,
    layers_of,
    loss_changes,
    output_noise,
    plan_of,
)
from scope_tasks import Task

# Before this step, rules that measure train with world.
MEASURED_AT = 100

Scopes = dict[str, str]

# Functions that choose the scopes of all layers, by the step before which they are called.
Schedule = dict[int, Callable[[Task], Scopes]]

# The names of measures of how much each layer needs a wide scope.
MEASURES: dict[str, Callable[[Task], dict[str, float]]] = {
    "noise": output_noise,
    "values": inverse_values,
    "gradient": gradient_noise,
    "loss": loss_changes,
    "chance": lambda task: chance(task),
}

_SPELLING = re.compile(
    r"""(?P<plan>recommended|kept|random)(=(?P<noise>[\d.]+))?
    |(?P<measure>noise|values|gradient|loss|chance)=(?P<share>\d+)%
    |values<(?P<wanted>[\d.]+)
    |sum<(?P<sum>[\d.]+)
    |all-but:(?P<patterns>[\w.*+]+)""",
    re.VERBOSE,
)


def schedule_of(scopes: str, setting_steps: int, ranks: int) -> Schedule:
    """Parse `scopes`.

    * `local`, `world`: the scope of every layer;
    * `progressive`: local, group:2, group:4, ..., world for equal parts of the steps;
    * `pooled`: world for layers with one element per channel and image, as after a global pooling;
    * `recommended`, `recommended=0.1`: world for 100 steps, then normscope.recommend_scopes;
    * `kept`: from the start the plan that `recommended` makes in a training of its own;
    * `random`: world for 100 steps, then as many bytes for layers chosen at random;
    * `noise=30%`: world for 100 steps, then for the layers with most output noise per byte, for
      this share of the bytes; `values`, `gradient`, `loss` and `chance` are other measures;
    * `values<4`: from the start world for layers whose norm batch is worth fewer independent
      values at the initial weights;
    * `sum<0.8`: from the start world for so many layers that the sum of 1 / values is smaller;
    * `all-but:PATTERN+PATTERN`: from the start world for all layers but those of these names.

    Raises:
        ValueError: If `scopes` is none of these.
    """
    if scopes in ("local", "world"):
        return {0: partial(_everywhere, scope=scopes)}
    if scopes == "pooled":
        return {0: _pooled}
    if scopes == "progressive":
        stages = ["local", *(f"group:{2**i}" for i in range(1, 9) if 2**i < ranks), "world"]
        return {
            i * setting_steps // len(stages): partial(_everywhere, scope=scope)
            for i, scope in enumerate(stages)
        }
    spelling = _SPELLING.fullmatch(scopes)
    if spelling is None:
        raise ValueError(f"scopes: expected one of those in --help, got {scopes!r}")
    if spelling["patterns"]:
        return {0: lambda task: _all_but(task, spelling["patterns"].split("+"))}
    if spelling["wanted"]:
        return {0: lambda task: _above(task, 1 / float(spelling["wanted"]))}
    if spelling["sum"]:
        return {0: lambda task: _within_sum(task, float(spelling["sum"]))}
    world = partial(_everywhere, scope="world")
    if spelling["measure"]:
        share = int(spelling["share"]) / 100
        return {0: world, MEASURED_AT: lambda task: _first(task, spelling["measure"], share)}
    noise = float(spelling["noise"]) if spelling["noise"] else None
    if spelling["plan"] == "random":
        return {0: world, MEASURED_AT: lambda task: _random(task, noise)}
    if spelling["plan"] == "kept":
        return {0: lambda task: _kept(task, noise)}
    return {0: world, MEASURED_AT: lambda task: _plan(task, noise)}


def _plan(task: Task, noise: float | None) -> Scopes:
    return {layer: str(scope) for layer, scope in plan_of(task, noise).scopes.items()}


def _kept(task: Task, noise: float | None) -> Scopes:
    other = Task(task.setting, task.seed)
    apply(other.model, _everywhere(other, "world"), task.setting.ranks)
    for step in range(MEASURED_AT):
        other.step(step)
    return _plan(other, noise)


def prices_of(task: Task) -> dict[str, int]:
    """Return the bytes of an exchange of each layer."""
    return {layer.layer: layer.exchange_bytes for layer in plan_of(task).layers}


def chance(task: Task) -> dict[str, float]:
    """Return random numbers that choose each layer with the same probability, per byte."""
    rng = np.random.default_rng(task.seed)
    return {layer: price * float(rng.random()) for layer, price in prices_of(task).items()}


def _first(task: Task, measure: str, share: float) -> Scopes:
    prices = prices_of(task)
    return _wide(prices, bought(MEASURES[measure](task), prices, share * sum(prices.values())))


def _random(task: Task, noise: float | None) -> Scopes:
    prices = prices_of(task)
    plan = _plan(task, noise)
    budget = sum(price for layer, price in prices.items() if plan[layer] != "local")
    return _wide(prices, bought(chance(task), prices, budget))


def bought(need: Mapping[str, float], prices: Mapping[str, int], budget: float) -> set[str]:
    """Take the layers in the order of need per byte, and skip those that exceed what is left."""
    layers: set[str] = set()
    for layer in sorted(prices, key=lambda layer: need[layer] / prices[layer], reverse=True):
        if prices[layer] <= budget:
            layers.add(layer)
            budget -= prices[layer]
    return layers


def _above(task: Task, limit: float) -> Scopes:
    need = inverse_values(task)
    return _wide(need, {layer for layer, inverse in need.items() if inverse > limit})


def _within_sum(task: Task, limit: float) -> Scopes:
    prices, need = prices_of(task), inverse_values(task)
    left, wide = sum(need.values()), set()
    for layer in sorted(prices, key=lambda layer: need[layer] / prices[layer], reverse=True):
        if left <= limit:
            break
        wide.add(layer)
        left -= need[layer] * (1 - 1 / task.setting.ranks)
    return _wide(need, wide)


def _pooled(task: Task) -> Scopes:
    plan = plan_of(task)
    return {
        layer.layer: "world"
        if layer.candidates[0].elements == layer.candidates[0].samples
        else "local"
        for layer in plan.layers
    }


def _all_but(task: Task, patterns: list[str]) -> Scopes:
    layers = layers_of(task.model)
    narrow = {name for name in layers if any(fnmatchcase(name, each) for each in patterns)}
    if not narrow:
        raise ValueError(f"scopes: expected some of {', '.join(layers)}, got {patterns}")
    return _wide(layers, set(layers) - narrow)


def _everywhere(task: Task, scope: str) -> Scopes:
    return dict.fromkeys(layers_of(task.model), scope)


def _wide(layers: Mapping[str, object], wide: set[str]) -> Scopes:
    return {layer: "world" if layer in wide else "local" for layer in layers}


def apply(model: nn.Module, scopes: Scopes, ranks: int) -> None:
    """Give the layers the scopes that stand for these scopes in one process."""
    for name, layer in layers_of(model).items():
        layer.scope = normscope.Scope(in_one_process(scopes[name], ranks))


def with_group_norm(network: nn.Module) -> nn.Module:
    """Replace batch normalization by group normalization (Wu and He 2018), in place."""
    for name, child in network.named_children():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
            channels = child.num_features
            setattr(network, name, nn.GroupNorm(min(8, channels // 4), channels))
        else:
            with_group_norm(child)
    return network
