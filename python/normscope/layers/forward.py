# SPDX-License-Identifier: Apache-2.0
"""The forward of layers and functions, in training and in evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.nn import functional

from normscope._binding import groups, ops
from normscope._binding.ops import ForwardArguments
from normscope._binding.torch_private import constant_in_graphs, is_exporting, open_joins
from normscope.layers.count import AFTER_GRAPH, NO_STATE, Counter, add_to_count, state_of
from normscope.layers.ending import NOTHING, Ending
from normscope.layers.masks import Rows, checked, filled
from normscope.layers.scope import Scope


def scope_and_group_in_use(scope: Scope, name: str | None, x: torch.Tensor) -> tuple[str, str]:
    """Return the scope and the group for training on ``x`` [N, ...].

    The ranks agree on the scope when it is first used.

    Raises:
        TypeError: If x is no tensor.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    group_name: str = groups.name_in_use(name)
    if group_name and open_joins:  # a guard of compiled layers
        _refuse_join(scope)
    if not scope.depends_on_samples or x.dim() == 0:
        return scope.text, group_name
    samples = len(range(x.shape[0]))  # an int, even if the batch size is symbolic in a trace
    return _scope_of_samples(scope.text, group_name, samples), group_name


def notify_peers_of_layer(
    error: Exception, x: object, scope: Scope, group: str | None, layer: str
) -> None:
    """Notify the other ranks that a call fails before its op, and name what is wrong with x."""
    ops.notify_peers(error, scope.text, groups.name_in_use(group))
    ops.name_input(error, x, layer)


def _refuse_join(scope: Scope) -> None:
    if not scope.is_of_one_rank:
        raise RuntimeError(
            f"normscope: expected no DistributedDataParallel.join() or Join around a layer with "
            f"scope {scope}, which a rank without batches cannot follow; iterate over "
            "normscope.joined(batches) instead, or pass throw_on_early_termination=True"
        )


# Runs outside the graph too: the number of slices is a constant of the graph.
@constant_in_graphs
def _scope_of_samples(text: str, group_name: str, samples: int) -> str:
    return ops.resolve_scope(text, group_name, samples)


def train(
    counter: Counter | None,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: ForwardArguments,
    ending: Ending = NOTHING,
    accumulated: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize ``x`` [N, C, *] with the statistics of the norm batch, and apply the ending."""
    buffers = arguments[2:5] if accumulated is None else (accumulated,)
    if counter is not None and torch.compiler.is_compiling():
        if not is_exporting():
            # A count in the graph would cause recompilation each step.
            counter._count = None, buffers, AFTER_GRAPH
        counter = None
    before = NO_STATE if counter is None else state_of(buffers, counter._count)
    if mask is None:
        y = ending.train(x, arguments, accumulated)
    else:
        from normscope.layers import masked_training  # which imports the compiler

        y, x = masked_training.train(x, mask, arguments, ending, accumulated)
    if counter is not None:
        counts = accumulated is not None or arguments.updates_running()
        elements = x.numel()
        if mask is None and elements > 0 and arguments.slice_stats == "first":
            samples = x.shape[0]
            # Slices are those of torch.chunk.
            elements = elements // samples * math.ceil(samples / (arguments.slices() or 1))
        add_to_count(counter, elements if counts else 0, buffers, before)
    return y


def evaluate_masked(
    x: torch.Tensor,
    mask: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    ending: Ending,
) -> torch.Tensor:
    """Normalize with running statistics, or with those of the rows if there are none.

    With running statistics, the masked positions are set to 0 before and after. If only y were set
    to 0, a NaN in the input would reach the gradients, because 0 * NaN is NaN.
    """
    if running_mean is None and running_var is None:
        rows = Rows.of(x, mask)
        taken, ending = rows.take(x), ending.with_residual(x, rows.take)
        y = functional.batch_norm(taken, None, None, weight, bias, training=True, eps=eps)
        return rows.put(ending.finish(y), x)
    checked(x, mask)
    ending = ending.with_residual(x, lambda residual: filled(residual, mask))
    y = functional.batch_norm(filled(x, mask), running_mean, running_var, weight, bias, eps=eps)
    return filled(ending.finish(y), mask)


def check_dimensions(x: torch.Tensor, dims: tuple[int, ...]) -> None:
    """Raise the op's errors unless x has one of these numbers of dimensions; () for any from 2."""
    if x.dim() < 2:
        empty = " (an empty batch has the shape [0, channels])" if x.numel() == 0 else ""
        raise ValueError(f"x: expected at least 2 dimensions, got {x.dim()}{empty}")
    if dims and x.dim() not in dims:
        raise ValueError(f"x: expected {' or '.join(map(str, dims))} dimensions, got {x.dim()}")


class Route(Protocol):
    """How the training forwards of a layer reach the ops, and its running statistics."""

    def train(
        self,
        counter: Counter | None,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize as :func:`train` does."""

    def add(
        self, counter: Counter, moments: torch.Tensor, elements: int, arguments: ForwardArguments
    ) -> None:
        """Add the moments of a norm batch that was normalized elsewhere with these arguments."""


class Direct:
    """The route of most layers: to the ops, which update the buffers."""

    train = staticmethod(train)

    def add(
        self, counter: Counter, moments: torch.Tensor, elements: int, arguments: ForwardArguments
    ) -> None:
        """Update the buffers, if there are any."""
        if arguments.running_mean is None:
            return
        buffers = arguments[2:5]
        before = state_of(buffers, counter._count)
        ops.batch_norm_finalize(moments, *arguments[2:7], arguments.running_mean.dtype)
        elements = elements if arguments.updates_running() else 0
        add_to_count(counter, elements, buffers, before)


DIRECT = Direct()


@contextmanager
def routed(layer: torch.nn.Module, route: Route) -> Iterator[None]:
    """Let the training forwards of a layer of normscope take a route."""
    attributes = vars(layer)
    before = attributes.get("_route")
    attributes["_route"] = route
    try:
        yield
    finally:
        if before is None:
            attributes.pop("_route", None)  # absent if the layer was reverted
        else:
            attributes["_route"] = before
