# SPDX-License-Identifier: Apache-2.0
"""The device type "testdevice" of torch, with two devices whose memory the host cannot access.

tests/torch_device implements it. A process must load it before its first backward, in which torch
starts a thread for each device, and keeps it until it ends.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName
from torch.utils import backend_registration

NAME = "testdevice"

# For groups that communicate on the device too. Other groups, as over "gloo", do not know it.
BACKENDS = f"cpu:gloo,{NAME}:over_host"

BUILT = Path(__file__).parents[2] / "build/release/tests/torch_device/torch_device.so"


@cache
def load() -> None:
    """Make this process know the device."""
    torch.ops.load_library(os.environ.get("NORMSCOPE_TEST_DEVICE_LIBRARY", BUILT))
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    distributed.Backend.register_backend("over_host", _over_host, devices=[NAME])


def _over_host(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> c10d.Backend:
    """Make a backend for the device. Only C++ can, and only for a group that has a name."""
    name = GroupName(f"over_host/{id(store)}")
    group = c10d.ProcessGroup(store, rank, size)
    host = c10d.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, host)
    c10d._register_process_group(name, group)
    torch.ops.test_device.add_backend(name)
    c10d._unregister_process_group(name)
    return group._get_backend(torch.device(NAME))


def _index(device: torch.device | int | str | None) -> int:
    index = device if isinstance(device, int) else torch.device(device or NAME).index
    return torch.accelerator.current_device_index() if index is None else index


@contextmanager
def _device(device: torch.device | int | str) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _module() -> Any:
    """Return what becomes torch.testdevice."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    ops = torch.ops.test_device
    module._initialized = True
    module._is_in_bad_fork = lambda: False
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.device = _device
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.Stream = torch.Stream
    module.Event = torch.Event
    module.manual_seed = ops.seed_generators
    module.manual_seed_all = ops.seed_generators
    module.get_rng_state = lambda device=None: ops.generator_state(_index(device))
    module.set_rng_state = lambda state, device=None: ops.set_generator_state(_index(device), state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module
