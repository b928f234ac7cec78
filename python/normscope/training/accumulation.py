# SPDX-License-Identifier: Apache-2.0
"""A single update of the running statistics for several batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from normscope._binding.ops import ForwardArguments, batch_norm_finalize, no_moments, notify_peers
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.count import NO_ELEMENTS, Count, Counter, add_to_count, state_of
from normscope.layers.ending import Ending
from normscope.layers.forward import routed, train
from normscope.models.selection import named_layers


@dataclass
class _Accumulator:
    """The route, in the block, of the layers with the same running statistics."""

    layers: list[BatchNorm]
    running_mean: torch.Tensor
    momentum: float | None
    moments: torch.Tensor  # in the format of the ops, of all norm batches so far
    _count: Count = NO_ELEMENTS

    @classmethod
    def of(cls, layers: list[BatchNorm]) -> _Accumulator:
        """Make one without moments, for layers with the same running statistics."""
        mean = layers[0].running_mean
        assert mean is not None
        return cls(layers, mean, layers[0].momentum, no_moments(len(mean), mean.device))

    def train(
        self,
        counter: Counter | None,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: ForwardArguments,
        ending: Ending,
    ) -> torch.Tensor:
        """Normalize ``x``; the layer's buffers and its count stay as they are."""
        neutral = arguments.without_running()
        if not self._takes(arguments):
            return train(None, x, mask, neutral, ending)
        return train(self, x, mask, neutral, ending, self.moments)

    def add(
        self, counter: Counter, moments: torch.Tensor, elements: int, arguments: ForwardArguments
    ) -> None:
        """Add moments to those of the block."""
        if self._takes(arguments):
            before = state_of((self.moments,), self._count)
            self.moments += moments
            add_to_count(self, elements, (self.moments,), before)

    def _takes(self, arguments: ForwardArguments) -> bool:
        """Return whether the moments of a call are of the block: it would update by itself."""
        mean = arguments.running_mean
        if mean is None or not arguments.updates_running():
            return False
        # A replica's may be another tensor with the same memory.
        if mean is not self.running_mean and not mean.is_set_to(self.running_mean):
            expected, got = "the buffers that it had at the start", "others"
        elif arguments.momentum == self.momentum:
            return True
        elif self.moments.any():
            expected, got = f"momentum {self.momentum}", str(arguments.momentum)
        else:
            self.momentum = arguments.momentum
            return True
        error = ValueError(
            f"{arguments.layer or 'layer'}: expected {expected} in all calls of a block of "
            f"accumulate, got {got}"
        )
        notify_peers(error, arguments.scope, arguments.group)
        raise error

    def update(self) -> None:
        """Update the running statistics that the layers have now."""
        for layers in _sharing(self.layers):
            buffers = layers[0].running_mean, layers[0].running_var, layers[0].num_batches_tracked
            if buffers[0] is None:
                continue
            before = state_of(buffers, NO_ELEMENTS)
            moments = self.moments.to(buffers[0].device)
            batch_norm_finalize(moments, *buffers, self.momentum, layers[0].eps, buffers[0].dtype)
            for layer in layers:
                if isinstance(layer, BatchNorm):  # not reverted
                    add_to_count(layer, self._count[0], buffers, before)


def _sharing(layers: list[BatchNorm]) -> list[list[BatchNorm]]:
    """Return the layers, those with the same running statistics together."""
    sharing: dict[int, list[BatchNorm]] = {}
    for layer in layers:
        sharing.setdefault(id(layer.running_mean), []).append(layer)
    return list(sharing.values())


@contextmanager
def accumulate(model: torch.nn.Module) -> Iterator[None]:
    """Update running statistics once for all training forwards of a ``with`` block.

    For gradient accumulation. Each forward is still normalized with the statistics of its own norm
    batch. The running statistics are updated once, at the end of the block, with the moments of all
    norm batches together: they get the same bits as if the batches had been one, and
    ``num_batches_tracked`` increases by one. They do not change within the block, nor if the block
    raises.

    A forward takes part if it would update running statistics by itself: one with ``momentum=0`` or
    ``track_running_stats=False``, set for that forward, changes nothing. The update has the
    momentum of the forwards, whatever the layer's is at the end.

    All layers of normscope with running statistics take part, in the same way on every rank. No
    extra messages are sent. With ``slices:K`` and ``slice_stats="first"``, the moments of the first
    slices are used; ``sequential`` is treated as ``pooled``.

    Args:
        model: A model, or a single layer.

    Raises:
        ValueError: If the model has no layers of normscope with running statistics, or one is lazy
            and has seen no input; in a forward, if the layer's momentum differs from that of
            earlier ones, or its buffers are not those from the start of the block.
        RuntimeError: If a layer is already in a block of ``accumulate``.

    Example:
        >>> layer = torch.nn.Sequential(BatchNorm(1, momentum=1.0))
        >>> with accumulate(layer):
        ...     for micro_batch in torch.tensor([[[1.0], [2.0]], [[3.0], [6.0]]]):
        ...         _ = layer(micro_batch)
        >>> layer[0].running_mean, layer[0].num_batches_tracked
        (tensor([3.]), tensor(1))
    """
    accumulators = [_Accumulator.of(layers) for layers in _sharing(_layers_of(model))]
    with ExitStack() as stack:
        for accumulator in accumulators:
            for layer in accumulator.layers:
                stack.enter_context(routed(layer, accumulator))
        yield
    for accumulator in accumulators:
        accumulator.update()


def _layers_of(model: torch.nn.Module) -> list[BatchNorm]:
    layers = []
    for name, layer in named_layers(model, BatchNorm, None, None):
        if layer.running_mean is None:
            continue
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
