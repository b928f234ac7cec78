# SPDX-License-Identifier: Apache-2.0
"""Process groups by name: a layer that held the object could not be copied or pickled."""

from typing import cast

import torch
from torch import distributed

NO_GROUP = ""


def name_of(group: "distributed.ProcessGroup | None") -> str | None:
    """The name that a layer keeps; None stands for the default group.

    Raises:
        ValueError: If this process is not a rank of the group.
    """
    if group is None:
        return None
    if group == distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("process_group: expected a group that this rank is in, got another")
    return cast("str", group.group_name)


def named(name: str | None) -> "distributed.ProcessGroup | None":
    """The group that a name stands for; None for the default group."""
    return None if name is None else distributed.distributed_c10d._resolve_process_group(name)


# A graph that torch.compile makes holds the name, not the look-up.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def name_in_use(name: str | None) -> str:
    """The group to run in now: the named one, else the default one if it is initialized."""
    if name is not None:
        return name
    if distributed.is_available() and distributed.is_initialized():
        return cast("str", distributed.group.WORLD.group_name)
    return NO_GROUP
