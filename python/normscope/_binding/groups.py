# SPDX-License-Identifier: Apache-2.0
"""Process groups by name: a layer that held the group itself could not be copied or pickled."""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from normscope._binding import ops
from normscope._binding.torch_private import (
    constant_in_graphs,
    new_process_group,
    process_group_named,
    process_groups,
)

NONE = ""

# torch may have been built without torch.distributed.
_HAS_GROUPS = distributed.is_available()

Value = TypeVar("Value")

# The numbers of layers without a name, by what made each of them different.
_unnamed_layers: "weakref.WeakKeyDictionary[distributed.ProcessGroup | None, dict[int, int]]"
_unnamed_layers = weakref.WeakKeyDictionary()

# The layers that have exchanged, by group, by scope and name: what made each of them different.
_layers_of_name: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
_lock = threading.Lock()

# Layers of one name that get different names: bounded, because a program may train copies without
# end.
_MOST_OF_A_NAME = 8

_watched: "weakref.WeakSet[distributed.ProcessGroup]" = weakref.WeakSet()

# The default group of the last call, and its name: layers ask in each forward, and torch makes the
# name anew.
_last_default: "tuple[Callable[[], distributed.ProcessGroup | None], str]" = (lambda: None, NONE)

# Backends written in Python cannot be shut down any later.
atexit.register(ops.forget_groups)


def _watch(group: "distributed.ProcessGroup") -> None:
    """Make the library forget the group when destroy_process_group() releases it."""
    if group in _watched:
        return
    _watched.add(group)
    _layers_of_name.pop(group.group_name, None)  # of an earlier group
    weakref.finalize(group, ops.forget_groups, only_destroyed=True).atexit = False


def name_of(group: "distributed.ProcessGroup | DeviceMesh | None") -> str | None:
    """Return the name of a group, which a layer stores; None stands for the default group.

    Raises:
        ValueError: If this process is not a rank of the group, or a mesh has several dimensions.
    """
    if group is None:
        return None
    group = _checked(group)
    _watch(group)
    return group.group_name


def _checked(group: "distributed.ProcessGroup | DeviceMesh") -> "distributed.ProcessGroup":
    """Return a group, or that of a mesh."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                "process_group: expected a mesh of one dimension, or one dimension of a mesh, as "
                f'mesh["dp"], got one of {group.ndim}'
            )
        group = group.get_group()
    # new_group returns something else on ranks that are not in the group.
    if not isinstance(group, distributed.ProcessGroup):
        is_of_others = group == distributed.GroupMember.NON_GROUP_MEMBER
        raise ValueError(
            "process_group: expected a process group or mesh that this rank is in, got "
            f"{'a group of other ranks' if is_of_others else repr(group)}"
        )
    return group


def names_of_layers() -> set[str]:
    """Return the names of the default group, "" if there is none, and of all that layers name."""
    return {name_in_use(None), *(group.group_name for group in list(_watched))}


def named(name: str | None) -> "distributed.ProcessGroup | None":
    """Return the group with the given name; None stands for the default group."""
    if name is None:
        return None
    return process_group_named(name)


def in_use(
    group: "distributed.ProcessGroup | DeviceMesh | None",
) -> "distributed.ProcessGroup | None":
    """Return the given group, or else the default group if it is initialized."""
    if group is not None:
        return _checked(group)
    return distributed.group.WORLD if _HAS_GROUPS else None


def _know_all() -> None:
    """Tell the library the groups of this process; a forked process only has copies of them."""
    if in_use(None) is not None:
        for group in process_groups():
            ops.know_process_group(group.group_name)


os.register_at_fork(before=_know_all)


def size_of(group: "distributed.ProcessGroup | DeviceMesh | None") -> int:
    """Return the number of ranks of the group in use, or 1 if there is none."""
    group = in_use(group)
    return 1 if group is None else group.size()


def rank_in(group: "distributed.ProcessGroup | DeviceMesh | None") -> int:
    """Return the rank of this process in the group in use, or 0 if there is none."""
    group = in_use(group)
    return 0 if group is None else group.rank()


# A graph of torch.compile contains the name, not the lookup.
@constant_in_graphs
def name_in_use(name: str | None) -> str:
    """Return the name of the group to use now: the given one, or the default group's, or ""."""
    global _last_default
    if name is not None:
        return name
    default = in_use(None)
    if default is None:
        return NONE
    last, its_name = _last_default
    if last() is not default:
        _watch(default)
        its_name = default.group_name
        _last_default = weakref.ref(default), its_name
    return its_name


# Runs outside the graph; the result becomes a constant of the graph.
@constant_in_graphs
def name_of_layer(group_name: str, made: int) -> str:
    """Return a name for a layer without one, at its first exchange in a group.

    Layers are numbered in the order of their first use in the group, which is the same on all
    ranks. The order of construction may differ, and so may the other layers of a rank. A compiler
    may ask several times before the layer has its name.

    Args:
        group_name: The group in use.
        made: Another number for each layer of this process.
    """
    try:
        group = named(group_name)
    except Exception:
        return ""  # the op raises the error
    numbers = _unnamed_layers.setdefault(group, {})
    return f"unnamed layer {numbers.setdefault(made, len(numbers) + 1)}"


# As above.
@constant_in_graphs
def name_in_exchange(group_name: str, scope: str, name: str, made: int) -> str:
    """Return a name that layers with equal names do not share, equal on all ranks of the scope.

    Layers with equal names are numbered in the order of their first exchange. One that was made
    before another that came first says so: ranks that begin in different orders then differ.
    Layers that never exchange count nowhere, so a rank may have more of them than its peers.

    Args:
        group_name: The group in use.
        scope: The scope in use.
        name: The name of the layer.
        made: Smaller for a layer that this process made earlier.
    """
    try:
        return _layers_of_name[group_name][scope, name][made]
    except KeyError:
        return _new_name_in_exchange(group_name, scope, name, made)


def _new_name_in_exchange(group_name: str, scope: str, name: str, made: int) -> str:
    with _lock:
        names = _layers_of_name.setdefault(group_name, {}).setdefault((scope, name), {})
        if made in names:  # another thread was faster
            return names[made]
        if len(names) == _MOST_OF_A_NAME:
            return f"{name} of a further model"
        in_exchange = name if not names else f"{name} of model {len(names) + 1}"
        later = [other for other in names if other > made]
        if later:
            in_exchange += f", made before model {list(names).index(min(later)) + 1}"
        names[made] = in_exchange
        return in_exchange


def gather(own: Value) -> list[Value]:
    """Gather a value from each rank of the default group, in rank order."""
    values: list[Value | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, own)
    return [value for value in values if value is not None]


# Groups for normscope's own messages, which the C++ library asks for.


def _backends(group: "distributed.ProcessGroup", *, devices: bool) -> str:
    names: str = distributed.get_backend_config(group)
    if devices:
        return names
    config = distributed.distributed_c10d.BackendConfig(distributed.Backend(names))
    return str(config.get_device_backend_map()["cpu"])


def make(name: str, parent: str, ranks: list[int], seconds: float, devices: bool) -> str:  # noqa: FBT001 - an op
    """Make a group of some ranks of ``parent``, with the backend that it uses for CPU tensors.

    Args:
        name: The name of the new group.
        parent: The name of the other one.
        ranks: Numbered as in the parent.
        seconds: The time limit.
        devices: Whether to make it with all the backends of the parent instead.

    Returns:
        The empty string, or the reason why the group could not be made.
    """
    try:
        group = named(parent)
        assert group is not None
        of_parent = distributed.get_process_group_ranks(group)
        new_process_group(
            name,
            _backends(group, devices=devices),
            [of_parent[rank] for rank in ranks],
            ranks.index(group.rank()),
            timedelta(seconds=seconds),
        )
    except Exception as error:  # whatever a backend raises
        return f"{type(error).__name__}: {error}"
    return ""


def close(name: str) -> None:
    """Destroy a group made by ``make``; ranks that wait in it raise."""
    try:
        group = named(name)
    except Exception:  # already destroyed, together with all others
        return
    distributed.destroy_process_group(group)


def check_signals() -> None:
    """Do nothing: calling any Python function in the main thread runs pending signal handlers."""


def register() -> torch.library.Library:
    """Define ops that call these functions, for the lifetime of the returned object."""
    library = torch.library.Library("normscope", "FRAGMENT")
    functions = {
        "make_process_group(str name, str parent, int[] ranks, float seconds, bool devices) "
        "-> str error": make,
        "close_process_group(str name) -> ()": close,
        "check_signals() -> ()": check_signals,
    }
    for schema, function in functions.items():
        library.impl(library.define(schema), function, "CompositeExplicitAutograd")
    return library
