# SPDX-License-Identifier: Apache-2.0
"""Records the inputs of layers while a model runs, and the cost of their exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from normscope._binding import ops
from normscope.independent_values import PartMoments
from normscope.layers.batch_norm import BatchNorm
from normscope.models.selection import input_of
from normscope.training.counters import communication_counters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class WatchedLayer:
    """What was recorded of a layer while the model ran.

    Args:
        name: The qualified name.
        layer: The layer that is watched.
        parts: The number of parts of a batch that stand for ranks; None with real ranks.
        calls: The moments of the layer's inputs. Entry i is about the i-th call of the layer in a
            forward of the model, over the batches that made so many calls.
        calls_of_batch: The number of calls so far in the current batch.
        seconds: The time spent in exchanges.
        exchanges: The number of exchanges.
    """

    name: str
    layer: BatchNorm
    parts: int | None
    calls: list[PartMoments] = field(default_factory=list)
    calls_of_batch: int = 0
    seconds: float = 0.0
    exchanges: int = 0

    def look(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Record the moments of an input, or of its unmasked elements."""
        if self.parts is not None and x.shape[0] < self.parts:
            raise ValueError(
                f"batches: expected at least {self.parts} samples, one for each rank, got "
                f"{x.shape[0]} in {self.name or 'model'}"
            )
        moments = PartMoments.of(x, 1 if self.parts is None else self.parts, mask=mask)
        if self.calls_of_batch == len(self.calls):
            self.calls.append(moments)
        else:
            before = self.calls[self.calls_of_batch]
            self.calls[self.calls_of_batch] = before.followed_by(moments)
        self.calls_of_batch += 1


@contextmanager
def watched(watch: WatchedLayer) -> Iterator[None]:
    """Record the moments of the layer's inputs and the cost of its exchanges."""
    before = communication_counters()

    def begin(*_: object) -> None:
        nonlocal before
        before = communication_counters()

    def end(layer: BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any], _y: object) -> None:
        after = communication_counters()
        watch.exchanges += after.calls - before.calls
        watch.seconds += after.seconds - before.seconds
        watch.look(*input_of(layer, args, kwargs))

    hooks = [
        watch.layer.register_forward_pre_hook(begin),
        watch.layer.register_forward_hook(end, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gather(watch: WatchedLayer, group: ProcessGroup) -> None:
    """Replace the moments of this rank by those of all ranks, as parts; a collective."""
    label = f"recommend_scopes, {watch.name or 'model'}"
    sizes = [len(moments.rows) for moments in watch.calls]
    own = torch.tensor([sum(sizes), watch.seconds], dtype=torch.float64)
    all_calls, seconds = ops.gather(own, group.group_name, label).T
    if len(set(all_calls.tolist())) > 1:
        raise ValueError(
            f"model: expected {watch.name or 'the layer'} to run as often on every rank, got "
            f"{[int(calls) for calls in all_calls]} times"
        )
    watch.seconds = float(seconds.mean())
    if not watch.calls:
        return
    rows = torch.cat([moments.rows for moments in watch.calls])  # [calls, 1, 1 + 2 C]
    of_ranks = ops.gather(rows.flatten(), group.group_name, label)
    parts = of_ranks.view(group.size(), len(rows), -1).transpose(0, 1)
    watch.calls = [PartMoments(of_call) for of_call in parts.split(sizes)]
