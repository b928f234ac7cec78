# SPDX-License-Identifier: Apache-2.0
"""What torch.distributed sees of its NCCL backend, on a host without NCCL.

Sums are Gloo's. As with NCCL, a backend is split by all of its ranks, also by those that are in no
part: a rank that does not come leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

_c10d = distributed.distributed_c10d

LIMIT = timedelta(seconds=60)

# How long a split waits for the other ranks; NCCL waits for ever.
SPLIT_LIMIT = timedelta(seconds=5)

DEVICE = torch.device("cpu", 0)


class NcclOptions:
    """As torch.distributed.ProcessGroupNCCL.Options."""

    def __init__(self) -> None:
        self._timeout = LIMIT
        self.is_high_priority_stream = True
        self.config = SimpleNamespace(max_ctas=32)
        self.split_from: NcclOnHost | None = None


class NcclOnHost(distributed.ProcessGroupGloo):
    """As torch.distributed.ProcessGroupNCCL, for tensors of the CPU."""

    Options = NcclOptions  # type: ignore[assignment]

    # All that were made; torch's C++ code would not keep the part of them that is in Python.
    made: list[NcclOnHost] = []  # noqa: RUF012 - see above

    def __init__(self, store: c10d.Store, rank: int, size: int, options: NcclOptions) -> None:
        if options.split_from is not None:
            options.split_from.perform_nocolor_split(DEVICE)
        super().__init__(store, rank, size, options._timeout)
        self.given = options
        self._keys = store, rank, size
        self._splits = 0
        self.made.append(self)

    def perform_nocolor_split(self, _device: torch.device) -> None:
        """Meet all ranks of this backend."""
        store, rank, size = self._keys
        self._splits += 1
        store.set(f"split/{self._splits}/{rank}", "here")
        store.wait([f"split/{self._splits}/{other}" for other in range(size)], SPLIT_LIMIT)


@contextmanager
def nccl_on_host(store: Path | str) -> Iterator[None]:
    """Make the default group anew, over NcclOnHost.

    Args:
        store: A file that does not exist yet, the same for every rank.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    distributed.destroy_process_group()
    names: dict[str, Any] = {
        "ProcessGroupNCCL": NcclOnHost,
        "is_nccl_available": lambda: True,
    }
    before = {name: getattr(_c10d, name, None) for name in names}
    devices = distributed.Backend.backend_capability["nccl"]
    for name, value in names.items():
        setattr(_c10d, name, value)
    distributed.Backend.backend_capability["nccl"] = ["cpu"]
    try:
        distributed.init_process_group(
            "nccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=LIMIT
        )
        distributed.all_reduce(torch.zeros(1))  # until all are connected: see connected_group()
        yield
    finally:
        distributed.Backend.backend_capability["nccl"] = devices
        for name, value in before.items():
            setattr(_c10d, name, value)
        NcclOnHost.made.clear()


def default_group() -> distributed.ProcessGroup:
    group = distributed.group.WORLD
    assert group is not None
    return group


def bind_device() -> None:
    """Bind the default group to a device, as the argument ``device_id`` does.

    torch itself makes no groups afterwards: it binds them too, and then only takes an accelerator.
    """
    default_group().bound_device_id = DEVICE
