# SPDX-License-Identifier: Apache-2.0
"""Process groups for normscope's own messages, made on request of the C++ library."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed

from normscope import _process_group


def _backend_for_the_host(group: distributed.ProcessGroup) -> str:
    names = distributed.Backend(distributed.get_backend_config(group))
    config = distributed.distributed_c10d.BackendConfig(names)
    return str(config.get_device_backend_map()["cpu"])


def _new_group(
    name: str, parent: distributed.ProcessGroup, ranks: list[int], limit: timedelta
) -> None:
    """Do what ``torch.distributed.new_group`` does, called by the ranks of the new group only.

    new_group names a group after the number of groups in the process, which may differ between
    ranks. Here the name is an argument.
    """
    c10d = distributed.distributed_c10d
    of_parent = distributed.get_process_group_ranks(parent)
    world_ranks = [of_parent[rank] for rank in ranks]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(parent.rank()),
        world_ranks,
        distributed.Backend(_backend_for_the_host(parent)),
        c10d._get_default_store(),
        name,  # type: ignore[arg-type]
        timeout=limit,
        group_desc="normscope",
    )
    c10d._world.pg_group_ranks[group] = {
        of_world: rank for rank, of_world in enumerate(world_ranks)
    }


def make(name: str, parent: str, ranks: list[int], seconds: float) -> str:
    """Make a group of some ranks of ``parent``, with the backend that it uses for CPU tensors.

    Returns:
        The empty string, or the reason why the group could not be made.
    """
    try:
        group = _process_group.named(parent)
        assert group is not None
        _new_group(name, group, ranks, timedelta(seconds=seconds))
    except Exception as error:  # whatever a backend raises
        return f"{type(error).__name__}: {error}"
    return ""


def close(name: str) -> None:
    """Destroy a group made by ``make``; ranks that wait in it raise."""
    try:
        group = _process_group.named(name)
    except Exception:  # already destroyed, together with all others
        return
    distributed.destroy_process_group(group)


def check_signals() -> None:
    """Do nothing: calling any Python function in the main thread runs pending signal handlers."""


def register() -> torch.library.Library:
    """Register these functions with the C++ library for the lifetime of the returned object."""
    kernels = torch.library.Library("normscope", "IMPL")
    kernels.impl("make_process_group", make, "CompositeExplicitAutograd")
    kernels.impl("close_process_group", close, "CompositeExplicitAutograd")
    kernels.impl("check_signals", check_signals, "CompositeExplicitAutograd")
    return kernels
