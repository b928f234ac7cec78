# SPDX-License-Identifier: Apache-2.0
"""Predicts what the scopes of a model's layers will cost on machines that are not at hand."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from normscope._binding import ops
from normscope.costs.model import Costs, exchange_seconds
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.scope import Scope
from normscope.models.selection import layers_in_training
from normscope.scopes.plan import ScopePlan

Layers = ScopePlan | torch.nn.Module | Iterable[tuple[str, int, str | Scope]]


@dataclass(frozen=True)
class LayerPrediction:
    """Predicted cost of a layer in each step.

    Args:
        layer: Qualified name.
        scope: The layer's scope; for ``norm_batch:M``, the scope that it resolves to.
        ranks: Number of ranks in its largest norm batch.
        bytes: Bytes that a rank sends in the forward and the backward together.
        seconds: Time of both exchanges if no rank is late, in the slowest group.
    """

    layer: str
    scope: str
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of synchronization in each step; ``print`` shows a table.

    Args:
        layers: Costs of the layers, in the order of the model.
        step_time: Seconds of a step without exchanges; None if not given.
        source: Where the costs come from, see :class:`Costs`.
    """

    layers: tuple[LayerPrediction, ...]
    step_time: float | None
    source: str

    @property
    def exchanges(self) -> int:
        """Number of exchanges that a rank takes part in per step."""
        return 2 * sum(layer.ranks > 1 for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes that a rank sends in a step, without the backend's padding."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def seconds(self) -> float:
        """Time of all exchanges of a step if no rank is late. Exchanges do not overlap."""
        return sum(layer.seconds for layer in self.layers)

    @property
    def share(self) -> float | None:
        """Share of the step that exchanges take; None if no step time was given."""
        if self.step_time is None:
            return None
        return self.seconds / (self.step_time + self.seconds)

    def __str__(self) -> str:
        """Return a table with a row for each layer."""
        names = [layer.layer or "model" for layer in self.layers]
        width = max(map(len, ["layer", *names]))
        across = max(map(len, ["scope", *(layer.scope for layer in self.layers)]))
        share = "" if self.share is None else f", {self.share:.1%} of the step"
        return "\n".join(
            [
                f"costs: {self.source or 'given'}",
                f"{'layer':{width}}  {'scope':{across}}  {'ranks':>6}{'bytes':>10}{'us':>10}",
                *(
                    f"{name:{width}}  {layer.scope:{across}}  {layer.ranks:6}"
                    f"{layer.bytes:10}{layer.seconds * 1e6:10.1f}"
                    for name, layer in zip(names, self.layers, strict=True)
                ),
                f"per step {self.exchanges} exchanges and {self.bytes:,} bytes sent by a rank; "
                f"{self.seconds * 1e3:.3f} ms{share}",
            ]
        )


def predict(
    plan: Layers,
    *,
    hosts: int,
    ranks_per_host: int,
    costs: Costs | str | os.PathLike[str],
    step_time: float | None = None,
    samples: int | None = None,
) -> Prediction:
    """Predict what the scopes of the layers cost per training step on a number of hosts.

    A layer whose scope spans several ranks makes one exchange in the forward and one in the
    backward. Exchanges of different layers cannot be merged, since the input of a layer depends on
    the statistics of the layer before it. Their times therefore add up. docs/scaling.md describes
    the model and its limits.

    Args:
        plan: A plan from :func:`normscope.recommend_scopes`; a model with layers of normscope; or
            name, channels and scope of each layer. Layers of a model that are in evaluation mode
            are left out.
        hosts: Number of hosts.
        ranks_per_host: Number of ranks on each host; ranks are numbered host by host.
        costs: The costs that ``python -m normscope measure`` measured, or its file.
        step_time: Seconds of a training step without exchanges.
        samples: Samples per rank and step; needed for ``norm_batch:M``.

    Raises:
        ValueError: If a scope does not fit the ranks, the costs lack a value that a scope needs, or
            an argument is out of range.

    Example:
        >>> costs = Costs.ethernet_25g()
        >>> layers = [("conv1.bn", 64, "world"), ("conv2.bn", 128, "node")]
        >>> prediction = predict(layers, hosts=125, ranks_per_host=8, costs=costs)
        >>> [layer.ranks for layer in prediction.layers], prediction.exchanges
        ([1000, 8], 4)
    """
    layers = _layers_of(plan)
    for name, number in (("hosts", hosts), ("ranks_per_host", ranks_per_host)):
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")
    if samples is not None and samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")
    if step_time is not None and not step_time > 0:
        raise ValueError(f"step_time: expected seconds above 0, got {step_time}")
    if not isinstance(costs, Costs):
        costs = Costs.load(costs)
    host_of_rank = [host for host in range(hosts) for _ in range(ranks_per_host)]
    divisions: dict[Scope, Division] = {}
    predictions = []
    for name, channels, scope in layers:
        try:
            if scope not in divisions:
                divisions[scope] = division_of(scope, host_of_rank, samples)
        except ValueError as error:
            raise ValueError(f"{name or 'model'}: {error}") from error
        division, size = divisions[scope], ops.message_bytes(channels)
        seconds = [
            exchange_seconds(size, *group, costs, division.sharing) for group in division.groups
        ]
        predictions.append(
            LayerPrediction(
                name,
                division.scope,
                division.ranks,
                2 * size if seconds else 0,
                2 * max(seconds, default=0.0),
            )
        )
    return Prediction(tuple(predictions), step_time, costs.source)


def _layers_of(plan: Layers) -> list[tuple[str, int, Scope]]:
    """Return name, channels and scope of each layer."""
    if isinstance(plan, ScopePlan):
        return [(each.layer, each.channels, Scope(each.scope)) for each in plan.layers]
    if isinstance(plan, torch.nn.Module):
        layers = [
            (name, layer.num_features, layer.scope)
            for name, layer in layers_in_training(plan, BatchNorm, include=None, exclude=None)
        ]
    else:
        try:
            rows = [(name, channels, scope) for name, channels, scope in plan]
        except (TypeError, ValueError) as error:
            raise ValueError(
                "plan: expected a plan, a model, or name, channels and scope of each layer, got "
                f"{plan!r}"
            ) from error
        layers = [(name, channels, Scope(str(scope))) for name, channels, scope in rows]
    if not layers:
        raise ValueError(
            "plan: expected layers of normscope in training mode, got none; normscope.convert "
            "makes them, and train() ends an evaluation"
        )
    for name, channels, _ in layers:
        if channels < 1:
            raise ValueError(
                f"plan: expected at least 1 channel, got {channels} in {name or 'model'}"
            )
    return layers


class Division(NamedTuple):
    """Groups into which a scope divides ranks."""

    scope: str  # for norm_batch:M, the scope that it resolves to
    ranks: int  # of the largest group
    groups: frozenset[tuple[int, int]]  # of several ranks: its hosts, and most ranks on one of them
    sharing: int  # the most groups that use the link of one host at the same time


def division_of(scope: Scope, host_of_rank: list[int], samples: int | None) -> Division:
    """Return the groups into which a scope divides ranks on given hosts.

    Raises:
        ValueError: If the scope needs more ranks than there are, as in training; or if it depends
            on the samples per rank, and ``samples`` is None.
    """
    if scope.depends_on_samples and samples is None:
        raise ValueError(
            f"samples: expected the samples per rank and step, since a layer has scope {scope}, "
            "got None"
        )
    resolved, leaders = ops.divide_ranks(scope.text, samples or 0, host_of_rank)
    groups: dict[int, list[int]] = {}
    on_hosts = Counter(zip(leaders, host_of_rank, strict=True))
    for (leader, _), ranks in on_hosts.items():
        groups.setdefault(leader, []).append(ranks)
    crossing = Counter(host for leader, host in on_hosts if len(groups[leader]) > 1)
    return Division(
        resolved,
        max(map(sum, groups.values())),
        frozenset((len(each), max(each)) for each in groups.values() if sum(each) > 1),
        max(crossing.values(), default=1),
    )
