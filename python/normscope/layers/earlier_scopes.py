# SPDX-License-Identifier: Apache-2.0
"""A recomputation has the scope of its forward, even if the layer's has changed since."""

from __future__ import annotations

from collections import deque

from normscope._binding import ops
from normscope._binding.torch_private import (
    current_autograd_node,
    current_graph_task_id,
    next_node_number,
    queue_callback,
)
from normscope.layers.scope import Scope

# Changes that a layer remembers. More would not be forgotten if a program changed scopes forever.
_MOST_CHANGES = 64


class EarlierScopes:
    """The scopes that a layer had, and when.

    In each thread, autograd numbers its nodes as they are made. The node that runs when a layer is
    recomputed was made in the forward of the checkpointed part, just before or after the layer's
    own, and thus tells the scope that the layer had.
    """

    def __init__(self) -> None:
        self._changes: deque[tuple[int, Scope]] = deque()  # the first node after, the scope before
        self._first_known = 0  # the first node whose scope has not been forgotten
        # The backward that recomputes the layer, and its scope there. A checkpoint within a
        # checkpoint begins a backward within this one, with nodes that were made in it.
        self._outermost: tuple[int, Scope] | None = None

    def add(self, scope: Scope) -> None:
        """Add the scope that the layer had until now."""
        ops.note_change_of_scope()  # compiled layers do not ask this object
        node = next_node_number()
        if self._changes and self._changes[-1][0] == node:
            return  # there was no forward since
        if len(self._changes) == _MOST_CHANGES:
            self._first_known, _ = self._changes.popleft()
        self._changes.append((node, scope))

    def in_use(self, scope: Scope) -> Scope:
        """Return the scope of the forward at hand, of a layer that now has ``scope``."""
        task = current_graph_task_id()
        if task < 0:
            self._outermost = None  # a backward may have raised
            return scope
        if self._outermost is not None and self._outermost[0] != task:
            return self._outermost[1]
        if self._outermost is None:
            queue_callback(self._end)
        scope = self._of_node(scope)
        self._outermost = task, scope
        return scope

    def _of_node(self, scope: Scope) -> Scope:
        node = current_autograd_node()._sequence_nr()
        if node < self._first_known:
            raise RuntimeError(
                f"scope: expected at most {_MOST_CHANGES} changes between a forward and its "
                "recomputation, got more"
            )
        return next((before for first, before in self._changes if node < first), scope)

    def _end(self) -> None:
        self._outermost = None
