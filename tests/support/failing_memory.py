# SPDX-License-Identifier: Apache-2.0
"""Memory for tensors on the CPU that runs out where a test wants it to.

tests/torch_memory implements it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch_device import BUILT


@cache
def _ops() -> Any:
    device = Path(os.environ.get("NORMSCOPE_TEST_DEVICE_LIBRARY", BUILT))
    torch.ops.load_library(str(device.parents[1] / "torch_memory/failing_memory.so"))
    return torch.ops.test_memory


class FailingMemory:
    """A block in which one request for the memory of a tensor fails, in this thread.

    Args:
        failing: Which of the requests, as a number from 0; None for none.

    Attributes:
        requests: The number of requests in the block, once it has ended.
    """

    def __init__(self, failing: int | None = None) -> None:
        self._failing = -1 if failing is None else failing
        self.requests = 0

    def __enter__(self) -> FailingMemory:
        _ops().fail_request(self._failing)
        return self

    def __exit__(self, *_: object) -> None:
        self.requests = _ops().fail_request(-1)
