# SPDX-License-Identifier: Apache-2.0
"""A recomputation has the scope of its forward, even if the layer's has changed since."""

from __future__ import annotations

from collections import deque

from normscope._binding import ops
from normscope._binding.torch_private import current_graph_task_id
from normscope.layers.scope import Scope

# Changes that a layer remembers. More would not be forgotten if a program changed scopes forever.
_MOST_CHANGES = 64


class EarlierScopes:
    """The scopes that a layer had before each change, by the numbers of the changes."""

    def __init__(self) -> None:
        self._changes: deque[tuple[int, Scope]] = deque()
        self._last_forgotten = 0

    def add(self, scope: Scope) -> None:
        """Add the scope that the layer had until now."""
        number = ops.note_change_of_scope()
        if self._changes and self._changes[-1][0] == number:
            return  # there was no forward since
        if len(self._changes) == _MOST_CHANGES:
            self._last_forgotten, _ = self._changes.popleft()
        self._changes.append((number, scope))

    def in_use(self, scope: Scope) -> Scope:
        """Return the scope of the forward at hand, of a layer that now has ``scope``."""
        if current_graph_task_id() < 0:  # not in a backward
            return scope
        last = ops.change_before_forward()
        if last < self._last_forgotten:
            raise RuntimeError(
                f"scope: expected at most {_MOST_CHANGES} changes between a forward and its "
                "recomputation, got more"
            )
        return next((before for number, before in self._changes if last < number), scope)
