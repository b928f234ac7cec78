# SPDX-License-Identifier: Apache-2.0
"""Measures of how much a layer suffers from narrow statistics, to compare with output noise.

One process stands for all ranks: slices of its batch are their shares.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

import normscope
from normscope import ScopePlan
from scope_tasks import Task

BATCHES = 16

Layers = dict[str, normscope.BatchNorm]


def steps_of_a_plan(task: Task) -> range:
    """Return the steps whose batches are measured; they would follow the last training step."""
    return range(task.steps, task.steps + BATCHES)


def plan_of(task: Task, noise: float | None = None) -> ScopePlan:
    """Return the recommendation for ranks, which parts of the batches stand for."""
    batches = [task.images(step) for step in steps_of_a_plan(task)]
    model, ranks = task.model.train(), task.setting.ranks
    if noise is None:
        return normscope.recommend_scopes(model, batches, ranks=ranks)
    return normscope.recommend_scopes(model, batches, noise, ranks=ranks)


def layers_of(model: nn.Module) -> Layers:
    """Return the layers of normscope by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, normscope.BatchNorm)
    }


def output_noise(task: Task) -> dict[str, float]:
    """Return the noise of local statistics, as recommend_scopes measures it."""
    return {layer.layer: layer.candidates[0].noise for layer in plan_of(task).layers}


def inverse_values(task: Task) -> dict[str, float]:
    """Return 1 / n, if local statistics are as noisy as those of n independent normal values.

    The mean square of x about the mean of all batches is computed for each share. Of n independent
    normal values, its squared relative error is 2 / n.
    """
    shares: dict[str, list[torch.Tensor]] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[torch.Tensor]) -> None:
            x = arguments[0].detach().double()
            shares.setdefault(name, []).extend(x.tensor_split(task.setting.ranks))

        return hook

    layers = layers_of(task.model)
    hooks = [layer.register_forward_pre_hook(look(name)) for name, layer in layers.items()]
    with _left_as_it_is(task), torch.no_grad():
        for step in steps_of_a_plan(task):
            task.model(task.images(step))
    for hook in hooks:
        hook.remove()
    result = {}
    for name, parts in shares.items():
        channels = torch.stack([part.transpose(0, 1).flatten(1) for part in parts])
        mean = channels.mean((0, 2), keepdim=True)
        squares = (channels - mean).square().mean(2)  # [parts, C]
        variance = squares.mean(0)
        spread = (squares.var(0) / (variance + layers[name].eps).square()).mean()
        result[name] = float(spread / (1 - spread / len(parts)) / 2)
    return result


def gradient_noise(task: Task) -> dict[str, float]:
    """Return the variance that each layer's local statistics add to the gradient of the parameters.

    It is relative to the variance of the gradient between batches.
    """
    parameters = list(task.model.parameters())

    def gradients() -> torch.Tensor:
        of_batches = []
        for step in steps_of_a_plan(task):
            grads = torch.autograd.grad(task.loss(task.model, step), parameters)
            of_batches.append(torch.cat([grad.flatten() for grad in grads]).double())
        return torch.stack(of_batches)

    with _left_as_it_is(task):
        wide = gradients()
        between = wide.var(0).sum()
        return {
            name: float((gradients() - wide).square().sum(1).mean() / between)
            for name in _each_narrow(task)
        }


def loss_changes(task: Task) -> dict[str, float]:
    """Return the mean change of the training loss if only one layer is local."""

    def mean_loss() -> float:
        with torch.no_grad():
            losses = [task.loss(task.model, step).double() for step in steps_of_a_plan(task)]
        return float(torch.stack(losses).mean())

    with _left_as_it_is(task):
        wide = mean_loss()
        return {name: mean_loss() - wide for name in _each_narrow(task)}


@contextmanager
def _left_as_it_is(task: Task) -> Iterator[None]:
    """Train with world, and restore everything."""
    layers = layers_of(task.model)
    scopes = {name: layer.scope for name, layer in layers.items()}
    state = copy.deepcopy(task.model.state_dict())
    task.model.train()
    for layer in layers.values():
        layer.scope = normscope.Scope(in_one_process("world", task.setting.ranks))
    try:
        yield
    finally:
        task.model.load_state_dict(state)
        for name, layer in layers.items():
            layer.scope = scopes[name]


def _each_narrow(task: Task) -> Iterator[str]:
    for name, layer in layers_of(task.model).items():
        wide = layer.scope
        layer.scope = normscope.Scope(in_one_process("local", task.setting.ranks))
        yield name
        layer.scope = wide


def in_one_process(scope: str, ranks: int) -> str:
    """Return the scope in one process with the whole batch that corresponds to one of ranks."""
    if scope == "world":
        return "local"
    size = 1 if scope == "local" else int(scope.removeprefix("group:"))
    return f"slices:{ranks // size}"
