# SPDX-License-Identifier: Apache-2.0
"""Process groups by name: a layer that held the object could not be copied or pickled."""

import atexit
import os
import weakref

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from normscope import _library
from normscope.scope import Scope

NONE = ""

_unnamed_layers: "weakref.WeakKeyDictionary[distributed.ProcessGroup | None, int]"
_unnamed_layers = weakref.WeakKeyDictionary()

_watched: "weakref.WeakSet[distributed.ProcessGroup]" = weakref.WeakSet()

# Backends of Python's own cannot be ended any later.
atexit.register(_library.forget_groups)


def _watch(group: "distributed.ProcessGroup") -> None:
    """Have the library forget the group when destroy_process_group() lets go of it."""
    if group in _watched:
        return
    _watched.add(group)
    weakref.finalize(group, _library.forget_destroyed_groups).atexit = False


def name_of(group: "distributed.ProcessGroup | DeviceMesh | None") -> str | None:
    """The name that a layer keeps; None stands for the default group.

    Raises:
        ValueError: If this process is not a rank of the group, or a mesh has several dimensions.
    """
    if group is None:
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                "process_group: expected a mesh of one dimension, or one dimension of a mesh, as "
                f'mesh["dp"], got one of {group.ndim}'
            )
        group = group.get_group()
    if not isinstance(group, distributed.ProcessGroup):  # new_group's answer on other ranks
        raise ValueError("process_group: expected a group that this rank is in, got another")
    _watch(group)
    return group.group_name


def named(name: str | None) -> "distributed.ProcessGroup | None":
    """The group that a name stands for; None for the default group."""
    if name is None:
        return None
    return distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def in_use(group: "distributed.ProcessGroup | None") -> "distributed.ProcessGroup | None":
    """The given group, else the default one if it is initialized."""
    if group is None and distributed.is_available() and distributed.is_initialized():
        return distributed.group.WORLD
    return group


def _know_all() -> None:
    """Tell the library which groups are this process's: a fork of it has copies of them."""
    if distributed.is_available() and distributed.is_initialized():
        for group in distributed.distributed_c10d._world.pg_names:
            _library.know_process_group(group.group_name)


os.register_at_fork(before=_know_all)


def size_of(group: "distributed.ProcessGroup | None") -> int:
    """The ranks of the group in use; 1 where there is none."""
    group = in_use(group)
    return 1 if group is None else group.size()


# A graph that torch.compile makes holds the name, not the look-up.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def name_in_use(name: str | None) -> str:
    """The group to run in now: the named one, else the default one if it is initialized."""
    if name is not None:
        return name
    default = in_use(None)
    if default is None:
        return NONE
    _watch(default)
    return default.group_name


# Outside the graph, and part of it from then on.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def name_of_layer(group_name: str) -> str:
    """What a layer without a name is called from its first exchange in a group on.

    By the order of first uses there: ranks need not have made their layers in the same order, or
    no others.
    """
    try:
        group = named(group_name)
    except Exception:
        return ""  # the op says that there is no such group
    number = _unnamed_layers.get(group, 0) + 1
    _unnamed_layers[group] = number
    return f"unnamed layer {number}"


def scope_and_group_in_use(scope: Scope, name: str | None, x: torch.Tensor) -> tuple[str, str]:
    """The scope and the group to train ``x`` [N, ...] with now.

    The ranks agree on the scope at first use.
    """
    group_name: str = name_in_use(name)
    if not scope.depends_on_samples or x.dim() == 0:
        return scope.text, group_name
    samples = len(range(x.shape[0]))  # a number also where a graph is traced for any batch
    return _scope_of_samples(scope.text, group_name, samples), group_name


# Outside the graph too: how many slices there are is part of it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _scope_of_samples(text: str, group_name: str, samples: int) -> str:
    return _library.resolve_scope(text, group_name, samples)
