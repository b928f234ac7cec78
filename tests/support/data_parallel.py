# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel, with the argument names of the installed torch."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(model: nn.Module, *, sends_buffers: bool) -> DistributedDataParallel:
    """Wrap a model; if `sends_buffers`, all ranks get rank 0's buffers before each forward.

    Raises:
        FutureWarning: If torch has renamed the argument again.
    """
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if has_new_name else "broadcast_buffers"
    keywords: dict[str, Any] = {name: sends_buffers}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        return DistributedDataParallel(model, **keywords)
