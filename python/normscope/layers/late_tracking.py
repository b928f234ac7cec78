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

from normscope._binding import ops
from normscope._binding.torch_private import (
    current_autograd_node,
    current_graph_task_id,
    next_node_number,
)

# Forwards that a layer remembers. Those that are never recomputed must not be kept forever.
_MOST_FORWARDS = 64


class UntrackedForwards:
    """The forwards of a layer that left its running statistics as they were, without gradients.

    Such a forward makes no autograd nodes. The last one before it is that of the checkpoint around
    it, which later recomputes it. Forwards outside of a checkpoint are not recomputed.
    """

    def __init__(self) -> None:
        self._nodes: deque[int] = deque(maxlen=_MOST_FORWARDS)

    def add(self) -> None:
        """Add the forward that begins, if a checkpoint around it may recompute it."""
        if _is_in_a_function():
            self._nodes.append(next_node_number() - 1)

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


def _is_in_a_function() -> bool:
    """Return whether the code at hand runs in the forward of a torch.autograd.Function."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


@contextmanager
def updates_in_backward() -> Iterator[None]:
    """Let forwards inside a backward update running statistics."""
    before = ops.set_updates_in_backward(True)
    try:
        yield
    finally:
        ops.set_updates_in_backward(before)
