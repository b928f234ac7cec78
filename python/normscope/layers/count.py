# SPDX-License-Identifier: Apache-2.0
"""The number of elements in running statistics, as long as nothing else changes these."""

from __future__ import annotations

import ctypes
from operator import is_
from typing import Any, Protocol

import torch

Buffers = tuple[torch.Tensor | None, ...]

# Where a first mean is in memory, on the CPU: the mean, its address, and the bytes of its first
# element. To find them takes longer than to read them.
Memory = tuple[torch.Tensor | None, int, Any]

# What differs after a write to buffers: torch's versions of them, and on the CPU the first mean.
# Writes through .data, NumPy, a collective or the broadcast of DistributedDataParallel do not
# change the versions. Last, where the mean was read.
State = tuple[int, bytes, Memory]

# The number, which is None if it is unknown; the buffers; and their state at the last element. A
# plain tuple: each forward makes one.
Count = tuple[int | None, Buffers, State]

NO_MEMORY: Memory = (None, 0, None)
NO_STATE: State = (0, b"", NO_MEMORY)
AFTER_GRAPH: State = (-1, b"", NO_MEMORY)  # after a compiled graph, which cannot read it
NO_ELEMENTS: Count = (0, (), NO_STATE)


class Counter(Protocol):
    """Counts the elements in its running statistics."""

    _count: Count


def ran_in_graph(counter: Counter) -> bool:
    """Return whether a compiled graph was the last to put elements into the statistics."""
    return counter._count[2][0] == AFTER_GRAPH[0]


def state_of(buffers: Buffers, count: Count) -> State:
    """Return the state of buffers; those made in inference mode or mapped by vmap have none.

    Args:
        buffers: Running statistics, the mean first.
        count: The last count, whose memory is read again if it is that of the same mean.
    """
    version = 0
    try:
        for buffer in buffers:
            if buffer is not None:
                version += buffer._version
        mean = buffers[0]
        if type(mean) is not torch.Tensor:
            return version, b"", NO_MEMORY
        address = mean.data_ptr()
    except RuntimeError:
        return NO_STATE
    memory = count[2][2]
    if memory[0] is not mean or memory[1] != address:
        memory = _memory_of(mean, address)
    # No mode of torch sees the read.
    first = memory[2]
    return version, b"" if first is None else first.raw, memory


def _memory_of(mean: torch.Tensor, address: int) -> Memory:
    if not address or not mean.is_cpu:
        return mean, address, None
    return mean, address, (ctypes.c_char * mean.itemsize).from_address(address)


def elements_in(count: Count, buffers: Buffers, state: State) -> int | None:
    """Return the number of elements in buffers: 0 if they are others, or others wrote to them.

    It is unknown after a write that torch hides, and after a compiled graph, whose writes look like
    those of others. DistributedDataParallel writes what rank 0 has counted.
    """
    elements, counted, last = count
    if elements == 0:
        return 0
    if not all(map(is_, buffers, counted)):
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
    count = counter._count
    after = state_of(buffers, count)
    if after[0] == before[0] and after[1] == before[1]:
        return
    known = elements_in(count, buffers, before)
    total = None if known is None or elements is None else known + elements
    # The assignment of torch.nn.Module takes microseconds.
    vars(counter)["_count"] = total, buffers, after
