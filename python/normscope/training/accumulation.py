# SPDX-License-Identifier: Apache-2.0
"""A single update of the running statistics for several batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from normscope._binding.ops import ForwardArguments, no_moments
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.ending import Ending
from normscope.layers.forward import Counter, Layer, add_to_count, train


@dataclass
class _Accumulator:
    """The route of a layer in the block; it collects the moments of the layer's inputs."""

    moments: torch.Tensor  # in the format of the ops, of all norm batches so far
    elements_seen: int | None = 0  # like the attribute of a layer

    def train(
        self,
        counter: Counter | None,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize ``x``; the layer's buffers and its count stay as they are."""
        return train(self, x, mask, arguments.without_running(), ending, self.moments)

    def add(self, layer: Layer, moments: torch.Tensor, elements: int | None) -> None:
        """Add moments to those of the block."""
        self.moments += moments
        add_to_count(self, elements)


@contextmanager
def accumulate(model: torch.nn.Module) -> Iterator[None]:
    """Update running statistics once for all training forwards of a ``with`` block.

    For gradient accumulation. Each forward is still normalized with the statistics of its own norm
    batch. The running statistics are updated once, at the end of the block, with the moments of all
    norm batches together: they get the same bits as if the batches had been one, and
    ``num_batches_tracked`` increases by one. They do not change within the block, nor if the block
    raises.

    All layers of normscope with running statistics take part, in the same way on every rank. No
    extra messages are sent. With ``slices:K`` and ``slice_stats="first"``, the moments of the first
    slices are used; ``sequential`` is treated as ``pooled``.

    Args:
        model: A model, or a single layer.

    Raises:
        ValueError: If the model has no layers of normscope with running statistics, or one is lazy
            and has seen no input.
        RuntimeError: If a layer is already in a block of ``accumulate``.

    Example:
        >>> layer = torch.nn.Sequential(BatchNorm(1, momentum=1.0))
        >>> with accumulate(layer):
        ...     for micro_batch in torch.tensor([[[1.0], [2.0]], [[3.0], [6.0]]]):
        ...         _ = layer(micro_batch)
        >>> layer[0].running_mean, layer[0].num_batches_tracked
        (tensor([3.]), tensor(1))
    """
    layers = _layers_of(model)
    accumulators = [_Accumulator(_no_moments(layer)) for layer in layers]
    for layer, accumulator in zip(layers, accumulators, strict=True):
        layer._route = accumulator
    try:
        yield
    finally:
        for layer in layers:
            del layer._route
    for layer, accumulator in zip(layers, accumulators, strict=True):
        layer._update_running(accumulator.moments, accumulator.elements_seen)


def _no_moments(layer: BatchNorm) -> torch.Tensor:
    assert layer.running_mean is not None
    return no_moments(layer.num_features, layer.running_mean.device)


def _layers_of(model: torch.nn.Module) -> list[BatchNorm]:
    layers = []
    for name, layer in model.named_modules():
        if not isinstance(layer, BatchNorm) or not layer.track_running_stats:
            continue
        assert layer.running_mean is not None
        if is_lazy(layer.running_mean):
            raise ValueError(
                f"{name or 'model'}: expected a layer that has seen an input, got a lazy one"
            )
        if isinstance(layer._route, _Accumulator):
            raise RuntimeError(
                f"{name or 'model'}: expected a layer outside of other blocks of accumulate, got "
                "one inside"
            )
        layers.append(layer)
    if not layers:
        raise ValueError(
            "model: expected layers of normscope with running statistics, got "
            f"{type(model).__qualname__} without any"
        )
    return layers
