# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that normscope uses, with the reason beside each.

torch may change these names in any release. Private members that a class inherits from torch's are
not listed here if the class itself uses or overrides them: ``self._parameters`` of a layer, or its
``_check_input_dim``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed
from torch._higher_order_ops import effects
from torch.distributed.algorithms.join import Join
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Errors.

# torch.distributed.DistError, which not every build of torch has.
DistError: type[Exception] = torch._C._DistError
DistBackendError: type[Exception] = torch._C._DistBackendError

# Layers.

# The base of every batch normalization of torch.nn; no public class is.
TorchBatchNorm = batchnorm._BatchNorm

# The base of torch's lazy batch normalization, whose first call takes no mask.
LazyTorchBatchNorm = batchnorm._LazyNormBase

# Hooks that torch.nn.modules.module registers for all modules; nothing public lists them.
has_any_global_hook: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook

# Nothing public says whether a module has hooks.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a forward or backward hook is registered on the module."""
    return any(map(vars(module).get, _HOOKS))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a call of the module is one of what torch.compile has made of it."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def recompile_limit() -> int:
    """Return how often torch.compile compiles a function; for compiled models only.

    torch.compiler does not tell.
    """
    return int(sys.modules["torch._dynamo"].config.recompile_limit)


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the module's own dict of its children.

    named_children() leaves out a child that occurs twice, and setting an attribute calls code of
    the module.
    """
    return module._modules


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the module's own dict of its buffers.

    named_buffers() leaves out a buffer that occurs twice, and setting an attribute calls code of
    the module.
    """
    return module._buffers


@cache
def let_data_parallel_take(layer_class: type[torch.nn.Module]) -> None:
    """Let DistributedDataParallel take layers of a class that derives from torch.nn.SyncBatchNorm.

    On CPUs it refuses models with such layers, because torch's own cannot train there. It has no
    option for others. This changes torch for the whole process: to be called when there is such a
    layer.
    """
    check = DistributedDataParallel._passing_sync_batchnorm_handle

    @wraps(check)
    def check_others(parallel: DistributedDataParallel, model: torch.nn.Module) -> None:
        layers = (m for m in model.modules() if isinstance(m, torch.nn.SyncBatchNorm))
        others = [layer for layer in layers if not isinstance(layer, layer_class)]
        check(parallel, torch.nn.ModuleList(others))  # type: ignore[no-untyped-call]

    DistributedDataParallel._passing_sync_batchnorm_handle = check_others  # type: ignore[method-assign]


# The open blocks of Join, and so of DistributedDataParallel.join, in which a rank may leave the
# others.
open_joins: list[Join] = []


@cache
def watch_joins() -> None:
    """Keep ``open_joins`` from now on: nothing tells whether a Join is open.

    This changes torch for the whole process: to be called when there is a layer that asks.
    """
    enter, leave = Join.__enter__, Join.__exit__

    @wraps(enter)
    def watched_enter(join: Join) -> Any:  # noqa: ANN401 - torch's
        if join._enable and not join._throw_on_early_termination:
            open_joins.append(join)
        return enter(join)  # type: ignore[no-untyped-call]

    @wraps(leave)
    def watched_leave(join: Join, *error: Any) -> Any:  # noqa: ANN401
        if join in open_joins:
            open_joins.remove(join)
        return leave(join, *error)

    Join.__enter__, Join.__exit__ = watched_enter, watched_leave  # type: ignore[method-assign]


# Ops.

# Compilers then keep the calls of an op in program order. torch.library has nothing for it.
register_effectful_op = effects._register_effectful_op
ORDERED = effects._EffectType.ORDERED

# The number of the backward that runs; -1 outside of one. torch.autograd does not tell.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# The node that this backward runs. It tells which forward a recomputation belongs to, of which
# torch.utils.checkpoint says nothing.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node

# The transforms of torch.func around the current call. torch.func does not tell.
interpreter_stack: Callable[[], list[Any] | None] = torch._C._functorch.get_interpreter_stack

# Sees every op of a block. torch documents this class, but has it in a private module.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# A block that no such class sees. torch has nothing public for it.
without_modes = _python_dispatch._disable_current_modes


def argument_names(op: Any) -> list[str]:  # noqa: ANN401 - torch._ops.OpOverload
    """Return the names of the arguments of an op; its signature is nowhere else."""
    return [argument.name for argument in op._schema.arguments]


def is_exporting() -> bool:
    """Return whether torch.export is recording.

    ``torch.compiler.is_exporting`` is true whenever Dynamo of torch 2.11 records.
    """
    return torch.compiler._is_exporting_flag


Function = TypeVar("Function", bound=Callable[..., object])


def constant_in_graphs(function: Function) -> Function:
    """Let graphs of torch.compile contain the result of a function, which runs outside of them.

    torch.compiler.assume_constant_result does the same, but imports the compiler. Every process
    that imports normscope would spend time and memory on it.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


# Process groups. torch.distributed may be missing, hence functions.


def process_group_named(name: str) -> ProcessGroup:
    """Return the group with a name. Layers store names, which torch only looks up in private."""
    return distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def process_groups() -> list[ProcessGroup]:
    """Return all groups of this process, of which torch has no public list."""
    return list(distributed.distributed_c10d._world.pg_names)


# The most channels of a communicator over NCCL, as in normscope/comm/nccl/nccl_communicator.h.
_CHANNELS = 4


def _options_for(backend: str, limit: timedelta) -> Any:  # noqa: ANN401 - not in every build
    """Return options for a group over NCCL, or None for other backends."""
    c10d = distributed.distributed_c10d
    devices = c10d.BackendConfig(distributed.Backend(backend)).get_device_backend_map()
    if "nccl" not in devices.values():
        return None
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = limit
    options.is_high_priority_stream = False  # as without options
    options.config.max_ctas = _CHANNELS
    return options


@contextmanager
def _without_bound_device(group: ProcessGroup) -> Iterator[None]:
    """Bind the group to no device.

    With ``init_process_group(device_id=...)`` torch makes a new group by splitting the default
    group's communicator, for which NCCL needs all ranks of the world.
    """
    bound = group.bound_device_id
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = bound


def new_process_group(
    name: str, backend: str, world_ranks: list[int], own_rank: int, limit: timedelta
) -> None:
    """Do what ``torch.distributed.new_group`` does, called by the ranks of the new group only.

    new_group names a group after the number of groups in the process, which may differ between
    ranks. Here the name is an argument.
    """
    c10d = distributed.distributed_c10d
    with _without_bound_device(c10d._get_default_group()):
        group, _ = c10d._new_process_group_helper(
            len(world_ranks),
            own_rank,
            world_ranks,
            distributed.Backend(backend),
            c10d._get_default_store(),
            name,  # type: ignore[arg-type]
            backend_options=_options_for(backend, limit),
            timeout=limit,
            group_desc="normscope",
        )
    c10d._world.pg_group_ranks[group] = {
        of_world: rank for rank, of_world in enumerate(world_ranks)
    }
