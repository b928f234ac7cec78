# SPDX-License-Identifier: Apache-2.0
"""Checkpointing that tracks running statistics in the recomputation, and not in the forward.

torch.nn's layer would update its statistics in both. Some libraries therefore switch tracking off
in the forward, which runs without gradients. A layer of normscope never updates them in a
recomputation, except in one of such a forward.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.function import BackwardCFunction

from normscope._binding import ops
from normscope._binding.torch_private import current_autograd_node, current_graph_task_id

# Forwards that a layer remembers. Those that are never recomputed must not be kept forever.
_MOST_FORWARDS = 64


class UntrackedForwards:
    """The forwards of a layer that left its running statistics as they were, without gradients.

    The checkpoint around such a forward is a torch.autograd.Function, whose node later recomputes
    it. Forwards outside of a checkpoint are not recomputed.
    """

    def __init__(self) -> None:
        self._nodes: deque[int] = deque(maxlen=_MOST_FORWARDS)

    def add(self) -> None:
        """Add the forward that begins, if a checkpoint around it may recompute it."""
        node = _node_around()
        if node is not None:
            self._nodes.append(node)

    def take(self) -> bool:
        """Return whether the forward that begins recomputes one of them, which is then removed."""
        if current_graph_task_id() < 0:
            return False
        node = current_autograd_node()._sequence_nr()
        if node not in self._nodes:
            return False
        self._nodes.remove(node)
        return True


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _node_around() -> int | None:
    """Return the number of the node of the Function in whose forward the code at hand runs."""
    frame = sys._getframe(1)
    node = None
    while frame is not None and frame.f_code is not _APPLY:
        if node is None:  # not the last frame: the forward may be decorated
            contexts = (v for v in frame.f_locals.values() if isinstance(v, BackwardCFunction))
            node = next(contexts, None)
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None or node is None else int(node._sequence_nr())


@contextmanager
def updates_in_backward() -> Iterator[None]:
    """Let forwards inside a backward update running statistics."""
    before = ops.set_updates_in_backward(True)
    try:
        yield
    finally:
        ops.set_updates_in_backward(before)
