# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel, as the documents use it."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(model: nn.Module, *, sends_buffers: bool) -> DistributedDataParallel:
    """Wrap a model; if `sends_buffers`, all ranks get rank 0's buffers before each forward.

    Raises:
        FutureWarning: If torch has deprecated the attribute.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        parallel = DistributedDataParallel(model)
        parallel.broadcast_buffers = sends_buffers
    return parallel
