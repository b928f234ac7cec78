# SPDX-License-Identifier: Apache-2.0
"""Predicts what the scopes of a model's layers will cost on machines that are not at hand."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from normscope._host_layout import Division, HostLayout, division_of
from normscope._layers import named_layers
from normscope.costs import Costs, message_bytes
from normscope.exchange_times import check_algorithm, exchange_seconds
from normscope.modules import BatchNorm
from normscope.scope import Scope
from normscope.scope_plan import ScopePlan


class LayerScope(NamedTuple):
    """A layer's name, channels and scope, for :func:`predict`.

    Args:
        layer: Qualified name.
        channels: Number of channels of its input.
        scope: The ranks that share its statistics.
    """

    layer: str
    channels: int
    scope: str | Scope


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
class SizePrediction:
    """Predicted cost of a step on one number of hosts.

    Args:
        hosts: Number of hosts.
        ranks_per_host: Number of ranks on each host.
        layers: Costs of the layers, in the order of the model.
        step_time: Seconds of a step without exchanges; None if not given.
    """

    hosts: int
    ranks_per_host: int
    layers: tuple[LayerPrediction, ...]
    step_time: float | None

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host

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


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of synchronization for each number of hosts; ``print`` shows a table.

    Args:
        sizes: One prediction per number of hosts, in the given order.
        algorithm: The argument of :func:`predict`.
        source: Where the costs come from, see :class:`Costs`.
    """

    sizes: tuple[SizePrediction, ...]
    algorithm: str | None
    source: str

    def __str__(self) -> str:
        """Return a table with a row per number of hosts; for a single one, also a row per layer."""
        lines = [f"algorithm: {self.algorithm or 'the library'}; costs: {self.source or 'given'}"]
        if len(self.sizes) == 1:
            lines += _layer_table(self.sizes[0])
        return "\n".join([*lines, *_size_table(self.sizes)])


def predict(
    plan: ScopePlan | torch.nn.Module | Iterable[LayerScope | tuple[str, int, str]],
    *,
    hosts: int | Iterable[int],
    ranks_per_host: int,
    costs: Costs | str | os.PathLike[str],
    step_time: float | None = None,
    algorithm: str | None = None,
    samples: int | None = None,
) -> Prediction:
    """Predict what the scopes of the layers cost per training step on given numbers of hosts.

    A layer whose scope spans several ranks makes one exchange in the forward and one in the
    backward. Exchanges of different layers cannot be merged, since the input of a layer depends on
    the statistics of the layer before it. Their times therefore add up. docs/scaling.md describes
    the model and its limits.

    Args:
        plan: A plan from :func:`recommend_scopes`; a model with layers of normscope; or name,
            channels and scope of each layer. If the model is in training mode, its layers in
            evaluation mode are left out.
        hosts: One or several numbers of hosts.
        ranks_per_host: Number of ranks on each host; ranks are numbered host by host.
        costs: The costs that ``python -m normscope measure`` measured, or its file.
        step_time: Seconds of a training step without exchanges.
        algorithm: How ranks of several hosts sum. None: as the library does. ``two-level``: first
            within each host, then between hosts. ``flat``, ``ring`` or ``tree``: over all ranks, on
            a single level.
        samples: Samples per rank and step; needed for ``norm_batch:M``.

    Raises:
        ValueError: If a scope does not fit the ranks, the costs lack a value that a scope needs, or
            an argument is out of range.

    Example:
        >>> costs = Costs.ethernet_25g()
        >>> layers = [("conv1.bn", 64, "world"), ("conv2.bn", 128, "node")]
        >>> prediction = predict(layers, hosts=(1, 125), ranks_per_host=8, costs=costs)
        >>> [size.ranks for size in prediction.sizes], prediction.sizes[0].exchanges
        ([8, 1000], 4)
    """
    check_algorithm(algorithm)
    layers = _layers_of(plan)
    numbers = [hosts] if isinstance(hosts, int) else list(hosts)
    if not numbers or min(numbers) < 1:
        raise ValueError(f"hosts: expected numbers of at least 1, got {numbers}")
    if ranks_per_host < 1:
        raise ValueError(f"ranks_per_host: expected at least 1, got {ranks_per_host}")
    if samples is not None and samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")
    if step_time is not None and not step_time > 0:
        raise ValueError(f"step_time: expected seconds above 0, got {step_time}")
    if not isinstance(costs, Costs):
        costs = Costs.load(costs)
    sizes = tuple(
        _predict_size(
            layers, HostLayout(count, ranks_per_host), costs, step_time, algorithm, samples
        )
        for count in numbers
    )
    return Prediction(sizes, algorithm, costs.source)


def _layers_of(
    plan: ScopePlan | torch.nn.Module | Iterable[LayerScope | tuple[str, int, str]],
) -> list[tuple[str, int, Scope]]:
    """Return name, channels and scope of each layer."""
    if isinstance(plan, ScopePlan):
        return [(each.layer, each.channels, Scope(each.scope)) for each in plan.layers]
    if isinstance(plan, torch.nn.Module):
        found = named_layers(plan, BatchNorm, None, None)
        layers = [
            (name, layer.num_features, layer.scope)
            for name, layer in found
            if layer.training or not plan.training
        ]
    else:
        layers = [(name, channels, Scope(str(scope))) for name, channels, scope in plan]
    if not layers:
        raise ValueError(
            "plan: expected layers of normscope in training mode (see normscope.convert), got none"
        )
    for name, channels, _ in layers:
        if channels < 1:
            raise ValueError(
                f"plan: expected at least 1 channel, got {channels} in {name or 'model'}"
            )
    return layers


def _predict_size(
    layers: list[tuple[str, int, Scope]],
    layout: HostLayout,
    costs: Costs,
    step_time: float | None,
    algorithm: str | None,
    samples: int | None,
) -> SizePrediction:
    divisions: dict[Scope, Division] = {}
    predictions = []
    for name, channels, scope in layers:
        try:
            if scope not in divisions:
                divisions[scope] = division_of(scope, layout, samples)
        except ValueError as error:
            raise ValueError(f"{name or 'model'}: {error}") from error
        division, size = divisions[scope], message_bytes(channels)
        seconds = max(
            (
                exchange_seconds(size, counts, costs, algorithm, division.sharing)
                for counts in division.groups
            ),
            default=0.0,
        )
        ranks = max(map(sum, division.groups), default=1)
        sent = 2 * size if ranks > 1 else 0
        predictions.append(LayerPrediction(name, division.scope, ranks, sent, 2 * seconds))
    return SizePrediction(layout.hosts, layout.ranks_per_host, tuple(predictions), step_time)


def _layer_table(size: SizePrediction) -> list[str]:
    width = max(len("layer"), *(len(layer.layer or "model") for layer in size.layers))
    across = max(len("scope"), *(len(layer.scope) for layer in size.layers))
    lines = [f"{'layer':{width}}  {'scope':{across}}  {'ranks':>6}{'bytes':>10}{'us':>10}"]
    lines += [
        f"{layer.layer or 'model':{width}}  {layer.scope:{across}}  {layer.ranks:6}"
        f"{layer.bytes:10}{layer.seconds * 1e6:10.1f}"
        for layer in size.layers
    ]
    return lines


def _size_table(sizes: tuple[SizePrediction, ...]) -> list[str]:
    lines = [f"{'hosts':>6}{'ranks':>7}{'exchanges':>11}{'bytes':>12}{'ms':>10}{'share':>8}"]
    for size in sizes:
        share = "" if size.share is None else f"{size.share:.1%}"
        lines.append(
            f"{size.hosts:6}{size.ranks:7}{size.exchanges:11}{size.bytes:12,}"
            f"{size.seconds * 1e3:10.3f}{share:>8}"
        )
    return lines
