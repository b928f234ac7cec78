# SPDX-License-Identifier: Apache-2.0
"""The number of elements in running statistics, as long as nothing else changes these."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

Buffers = tuple[torch.Tensor | None, ...]

# What differs after a write to buffers: torch's versions of them. Writes through .data, NumPy, a
# collective or the broadcast of DistributedDataParallel do not change these. On the CPU they are
# noticed by the first mean.
State = tuple[int, bytes]

# The number, which is None if it is unknown; the buffers; and their state at the last element. A
# plain tuple: each forward makes one.
Count = tuple[int | None, Buffers, State]

NO_STATE: State = (0, b"")
AFTER_GRAPH: State = (-1, b"")  # after a compiled graph, which cannot read it
NO_ELEMENTS: Count = (0, (), NO_STATE)


class Counter(Protocol):
    """Counts the elements in its running statistics."""

    _count: Count


def ran_in_graph(counter: Counter) -> bool:
    """Return whether a compiled graph was the last to put elements into the statistics."""
    return counter._count[2] == AFTER_GRAPH


def state_of(buffers: Buffers) -> State:
    """Return the state of buffers; those made in inference mode or mapped by vmap have none."""
    version = 0
    try:
        for buffer in buffers:
            if buffer is not None:
                version += buffer._version
        mean = buffers[0]
        if type(mean) is torch.Tensor and mean.is_cpu:
            address = mean.data_ptr()
            if address:
                # It takes half a microsecond, and no mode of torch sees it.
                return version, ctypes.string_at(address, mean.itemsize)
    except RuntimeError:
        return NO_STATE
    return version, b""


def elements_in(count: Count, buffers: Buffers, state: State) -> int | None:
    """Return the number of elements in buffers: 0 if they are others, or others wrote to them.

    It is unknown after a write that torch hides, and after a compiled graph, whose writes look like
    those of others. DistributedDataParallel writes what rank 0 has counted.
    """
    elements, counted, last = count
    if elements == 0 or not counted:
        return elements
    for buffer, before in zip(buffers, counted, strict=True):
        if buffer is not before:
            return 0
    if last[0] == AFTER_GRAPH[0]:
        return None
    if state[0] != last[0]:
        return 0
    return elements if state[1] == last[1] else None


def add_to_count(counter: Counter, elements: int | None, buffers: Buffers, before: State) -> None:
    """Count elements that a call has put into buffers.

    Args:
        counter: Counts the elements.
        elements: Their number; None if unknown.
        buffers: The buffers.
        before: The state of the buffers before the call. The call has written nothing if it is
            still the same: it was a recomputation, or had fake tensors.
    """
    after = state_of(buffers)
    if after == before:
        return
    known = elements_in(counter._count, buffers, before)
    total = None if known is None or elements is None else known + elements
    # The assignment of torch.nn.Module takes microseconds.
    object.__setattr__(counter, "_count", (total, buffers, after))
