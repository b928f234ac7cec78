# SPDX-License-Identifier: Apache-2.0
"""What layers are given while a model runs, and what their exchanges cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from normscope import _library
from normscope._layers import input_of
from normscope.counters import communication_counters
from normscope.independent_values import PartMoments
from normscope.modules import BatchNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class WatchedLayer:
    """What was seen of a layer while the model ran.

    Args:
        name: Qualified name.
        layer: That is watched.
        parts: That stand for ranks; None where the ranks are there.
        calls: Moments of what it was given in a forward of the model, call by call, each of the
            batches that made so many.
        calls_of_batch: That the present batch has made.
        seconds: In exchanges.
        exchanges: That were made.
    """

    name: str
    layer: BatchNorm
    parts: int | None
    calls: list[PartMoments] = field(default_factory=list)
    calls_of_batch: int = 0
    seconds: float = 0.0
    exchanges: int = 0

    def look(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Take the moments of an input, of which a mask says what counts."""
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
    """Take moments of what the layer was given, and the cost of its exchanges."""
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
    """Put the moments of all ranks in the place of this one's, as parts; the same on every rank."""
    label = f"recommend_scopes, {watch.name or 'model'}"
    sizes = [len(moments.rows) for moments in watch.calls]
    own = torch.tensor([sum(sizes), watch.seconds], dtype=torch.float64)
    all_calls, seconds = _library.gather(own, group.group_name, label).T
    if len(set(all_calls.tolist())) > 1:
        raise ValueError(
            f"model: expected {watch.name or 'the layer'} to run as often on every rank, got "
            f"{[int(calls) for calls in all_calls]} times"
        )
    watch.seconds = float(seconds.mean())
    if not watch.calls:
        return
    rows = torch.cat([moments.rows for moments in watch.calls])  # [calls, 1, 1 + 2 C]
    of_ranks = _library.gather(rows.flatten(), group.group_name, label)
    parts = of_ranks.view(group.size(), len(rows), -1).transpose(0, 1)
    watch.calls = [PartMoments(of_call) for of_call in parts.split(sizes)]
