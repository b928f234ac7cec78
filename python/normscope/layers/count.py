# SPDX-License-Identifier: Apache-2.0
"""The number of elements in running statistics, as long as nothing else changes these."""

from __future__ import annotations

from typing import Protocol

import torch

Buffers = tuple[torch.Tensor | None, ...]

# The number, which is None if it is unknown; the buffers; and their version at the last element.
# Any other write to them increases it, unless torch hides the write: through .data, NumPy,
# a collective or the broadcast of DistributedDataParallel. A plain tuple: each forward makes one.
Count = tuple[int | None, Buffers, int]

NO_ELEMENTS: Count = (0, (), 0)
UNKNOWN: Count = (None, (), 0)


class Counter(Protocol):
    """Counts the elements in its running statistics."""

    _count: Count


def version_of(buffers: Buffers) -> int:
    """Return the sum of torch's versions of the buffers; those made in inference mode have none."""
    version = 0
    try:
        for buffer in buffers:
            if buffer is not None:
                version += buffer._version
    except RuntimeError:
        return 0
    return version


def elements_in(count: Count, buffers: Buffers, version: int) -> int | None:
    """Return the number of elements in buffers: 0 if they are others, or others wrote to them."""
    elements, counted, last = count
    if elements:
        if version != last:
            return 0
        for buffer, before in zip(buffers, counted, strict=True):
            if buffer is not before:
                return 0
    return elements


def add_to_count(counter: Counter, elements: int | None, buffers: Buffers, before: int) -> None:
    """Count elements that a call has put into buffers.

    Args:
        counter: Counts the elements.
        elements: Their number; None if unknown.
        buffers: The buffers.
        before: The version of the buffers before the call. The call has written nothing if it is
            still the same: it was a recomputation, or had fake tensors.
    """
    after = version_of(buffers)
    if after == before:
        return
    known = elements_in(counter._count, buffers, before)
    total = None if known is None or elements is None else known + elements
    # The assignment of torch.nn.Module takes microseconds.
    object.__setattr__(counter, "_count", (total, buffers, after))
