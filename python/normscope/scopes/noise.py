# SPDX-License-Identifier: Apache-2.0
"""Output noise: how much narrower statistics of a layer change the outputs of a model.

docs/numerics.md, "Output noise", derives the measure. One forward and one backward of random signs
measure all layers and scopes at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from normscope._binding import ops
from normscope._binding.torch_private import current_graph_task_id
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.ending import NOTHING, Ending
from normscope.layers.forward import train
from normscope.layers.masks import filled
from normscope.training.counters import communication_counters
from normscope.training.measuring import Watch

if TYPE_CHECKING:
    from normscope._binding.ops import ForwardArguments
    from normscope.layers.count import Counter


# The default limit for the noise of all layers, and what a norm batch and a layer need at least;
# normscope/core/scope_choice.h says why.
DEFAULT_NOISE, LEAST_SAMPLES, LEAST_ELEMENTS, TRAINED_UPDATES = ops.limits_of_scopes


class Shares(NamedTuple):
    """Which part of each batch this process has; arguments of the ops, in their order.

    Args:
        group: The name of the group of the ranks; "" for a single process.
        first: The rank of this process; 0 if parts of its batches stand for ranks.
        parts: The number of ranks that this process stands for.
        hosts: For each rank, a number that is the same for all ranks of a host.
    """

    group: str
    first: int
    parts: int
    hosts: tuple[int, ...]

    def notifying_peers(self) -> AbstractContextManager[None]:
        """Notify the other processes if a block raises, so that they do not wait for this one."""
        return ops.notifying_peers("world", self.group, Exception)

    def gather_numbers(self, numbers: list[float], what: str) -> list[list[float]]:
        """Return the numbers of all processes: a list for each."""
        return ops.gather_numbers(numbers, self.group, f"recommend_scopes, {what}")


@dataclass
class _Call:
    """A call of a layer in the current batch."""

    x: torch.Tensor
    mask: torch.Tensor | None
    weight: torch.Tensor | None  # a copy: fully_shard frees parameters after each forward
    edge: GradientEdge | None  # of the normalization's output; None in a block without gradients


@dataclass
class WatchedLayer(Watch):
    """The record of a layer while a model runs.

    Args:
        name: The qualified name.
        layer: The layer that is watched.
        calls: The calls in the current batch.
        noise: For each batch that reached the layer, noise, and samples and elements of the
            smallest norm batch, of the candidates [candidates, 3].
        seconds: The time spent in exchanges.
        exchanges: The number of exchanges.
    """

    name: str
    layer: BatchNorm
    calls: list[_Call] = field(default_factory=list)
    noise: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0
    exchanges: int = 0

    @property
    def label(self) -> str:
        """The name in errors and exchanges."""
        return self.name or "model"

    def train(
        self,
        counter: Counter | None,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize without updating anything, and record the call."""
        before = communication_counters()
        z = train(None, x, mask, arguments.without_running())
        after = communication_counters()
        if current_graph_task_id() < 0:  # in a backward, it repeats a call
            self.exchanges += after.calls - before.calls
            self.seconds += after.seconds - before.seconds
            edge = None
            if torch.is_grad_enabled():
                if not z.requires_grad:
                    z = z.requires_grad_().clone()  # the program may change it in place
                edge = get_gradient_edge(z)
            weight = None if arguments.weight is None else arguments.weight.detach().clone()
            self.calls.append(_Call(x.detach(), mask, weight, edge))
        if ending is NOTHING:
            return z
        y = ending.finish(z)
        return y if mask is None else filled(y, mask)

    def add_batch(
        self, gradients: Iterator[torch.Tensor | None], to_noise: float, shares: Shares
    ) -> None:
        """Add the noise of the calls of a batch; a collective.

        Args:
            gradients: The gradients of a projection of the outputs, for each call with an edge.
            to_noise: Turns squared changes of the projection into noise; infinity if the outputs do
                not vary.
            shares: Who has which part of the batch.
        """
        of_calls = [
            ops.output_noise(
                call.x,
                None if call.edge is None else next(gradients),
                call.mask,
                call.weight,
                self.layer.eps,
                math.inf if call.edge is None else to_noise,
                self.name,
                *shares,
            )
            for call in self.calls
        ]
        self.calls.clear()
        if of_calls:
            noise, sizes = torch.stack(of_calls).split([1, 2], dim=2)
            self.noise.append(torch.cat([noise.sum(0), sizes.amin(0)], dim=1))


def differentiable_outputs(outputs: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the tensors with a gradient in nested tuples, lists, mappings and dataclasses.

    A complex tensor becomes two, its real and its imaginary part.
    """
    if isinstance(outputs, torch.Tensor):
        if not outputs.requires_grad:
            return []
        return [outputs.real, outputs.imag] if outputs.is_complex() else [outputs]
    if isinstance(outputs, Mapping):
        children = list(outputs.values())
    elif isinstance(outputs, (tuple, list)):
        children = list(outputs)
    elif dataclasses.is_dataclass(outputs):
        children = [getattr(outputs, each.name) for each in dataclasses.fields(outputs)]
    else:
        children = []
    return [tensor for child in children for tensor in differentiable_outputs(child)]


def measure_batch(
    watches: list[WatchedLayer], outputs: list[torch.Tensor], batch: int, shares: Shares
) -> None:
    """Run a backward from the outputs of a batch, and add the noise of its calls; a collective."""
    edges = [call.edge for watch in watches for call in watch.calls if call.edge is not None]
    gradients: tuple[torch.Tensor | None, ...] = ()
    cotangents, to_noise = ops.random_cotangents(outputs, batch, *shares[:3])
    if edges:  # a batch may reach no layer, or each without gradients
        gradients = torch.autograd.grad(outputs, edges, cotangents, allow_unused=True)
    left = iter(gradients)
    for watch in watches:
        watch.add_batch(left, to_noise, shares)
