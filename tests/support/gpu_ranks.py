# SPDX-License-Identifier: Apache-2.0
"""Ranks over NCCL: one for each GPU, or a few on each if NCCL allows it.

With NORMSCOPE_TEST_DEVICE=cpu, nccl_on_host.py stands for it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

# NCCL's own variable. Other releases ignore it, and refuse a second rank on a GPU.
SHARE_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"
FIRST_TO_SHARE = 2, 30

# Ranks on a GPU take turns on it, and each exchange waits for all of them.
RANKS_ON_A_GPU = 3

Version = tuple[int, ...]


def most_ranks(gpus: int, version: Version, *, shared: bool) -> int:
    """Return how many ranks NCCL connects.

    Args:
        gpus: The number of GPUs.
        version: That of NCCL.
        shared: Whether NCCL is told to let ranks share GPUs.
    """
    return gpus * RANKS_ON_A_GPU if shared and version >= FIRST_TO_SHARE else gpus


def reason_to_skip(ranks: int, gpus: int, version: Version, *, shared: bool) -> str | None:
    """Return why a test of some ranks cannot run, or None."""
    if ranks <= most_ranks(gpus, version, shared=shared):
        return None
    return (
        f"cuda: {ranks} ranks over NCCL need as many GPUs, or NCCL 2.30 with {SHARE_GPUS}=1 and at "
        f"most {RANKS_ON_A_GPU} ranks per GPU; here are {gpus} GPUs and NCCL "
        f"{'.'.join(map(str, version)) or 'none'}"
    )


@cache
def loaded_nccl() -> Version:
    """Return the version of the NCCL that torch has loaded; torch tells that of its headers."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(
            ctypes.byref(number)
        )
    except OSError:
        return ()
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def most_here() -> int:
    """Return how many ranks NCCL, or what stands for it, connects here."""
    if on_host():
        return 4
    return most_ranks(_gpus(), loaded_nccl(), shared=_shared())


def reason_here(ranks: int) -> str | None:
    """Return why a test of some ranks cannot run here, or None."""
    if on_host():
        return None
    return reason_to_skip(ranks, _gpus(), loaded_nccl(), shared=_shared())


def on_host() -> bool:
    """Return whether the CPU stands for a GPU."""
    return os.environ.get("NORMSCOPE_TEST_DEVICE") == "cpu"


def _shared() -> bool:
    return os.environ.get(SHARE_GPUS) == "1"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@contextmanager
def over_nccl(store: str, seconds: float) -> Iterator[None]:
    """Make the default group anew over NCCL, each rank bound to its GPU, which becomes current.

    Args:
        store: A file that does not exist yet, the same for every rank.
        seconds: The time limit of the group.
    """
    import torch
    from nccl_on_host import nccl_on_host
    from torch import distributed

    if on_host():
        with nccl_on_host(store):
            yield
        return
    rank, size = distributed.get_rank(), distributed.get_world_size()
    distributed.destroy_process_group()
    device = torch.device("cuda", rank % _gpus())
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=device,
    )
    yield
