# SPDX-License-Identifier: Apache-2.0
"""Running statistics from accumulated moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normscope import _library

if TYPE_CHECKING:
    from normscope.modules import BatchNorm


def no_moments(channels: int, device: torch.device) -> torch.Tensor:
    """Return the moments of no elements, to which others can be added."""
    size = _library.message_bytes(channels) // torch.float64.itemsize
    return torch.zeros(size, dtype=torch.float64, device=device)


def update_running(layer: BatchNorm, moments: torch.Tensor, elements: int | None) -> None:
    """Update the running statistics of a layer once, if it has any.

    Args:
        layer: The layer.
        moments: The moments of the norm batch.
        elements: The number of elements from this rank; None if unknown.
    """
    if not layer.track_running_stats:
        return
    accumulator = layer._accumulator
    if accumulator is not None:
        accumulator.moments += moments
    else:
        assert layer.running_mean is not None
        _library.batch_norm_finalize(
            moments,
            layer.running_mean,
            layer.running_var,
            layer.num_batches_tracked,
            layer.momentum,
            layer.eps,
            layer.running_mean.dtype,
        )
    counter = layer if accumulator is None else accumulator
    if elements is None or counter.elements_seen is None:
        counter.elements_seen = None
    else:
        counter.elements_seen += elements
