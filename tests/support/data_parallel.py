# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel under the names of any version of torch."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(model: nn.Module, *, sends_buffers: bool) -> DistributedDataParallel:
    """The model on all ranks, which get rank 0's buffers before each forward if `sends_buffers`.

    Raises:
        FutureWarning: If torch has another name for that by now.
    """
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if has_new_name else "broadcast_buffers"
    keywords: dict[str, Any] = {name: sends_buffers}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return DistributedDataParallel(model, **keywords)
