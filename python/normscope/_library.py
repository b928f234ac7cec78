# SPDX-License-Identifier: Apache-2.0
"""The C++ library: its ops, typed."""

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

# torch.distributed.DistError, which not every build of torch has.
DistError: type[Exception] = torch._C._DistError

# normscope._compiled has loaded them.
_ops = torch.ops.normscope

batch_norm_forward = _ops.batch_norm_forward.default
batch_norm_act_forward = _ops.batch_norm_act_forward.default
set_detect_non_finite = cast("Callable[[bool], bool]", _ops.set_detect_non_finite.default)
gather = cast("Callable[[torch.Tensor, str, str], torch.Tensor]", _ops.gather.default)
part_moments = cast("Callable[[torch.Tensor, int], torch.Tensor]", _ops.part_moments.default)
independent_values = cast(
    "Callable[[torch.Tensor, int, float], list[float]]", _ops.independent_values.default
)
choose_scope = cast(
    "Callable[[str, list[torch.Tensor], float, float, list[int]], "
    "tuple[int, list[str], list[int], torch.Tensor]]",
    _ops.choose_scope.default,
)
fail_exchange = cast("Callable[[str, str, str], None]", _ops.fail_exchange.default)
fail_all_exchanges = cast("Callable[[str], None]", _ops.fail_all_exchanges.default)
status_of_process = cast("Callable[[int], str]", _ops.status_of_process.default)
batch_norm_with_statistics = cast(
    "Callable[..., torch.Tensor]", _ops.batch_norm_with_statistics.default
)
batch_norm_moments = cast("Callable[[torch.Tensor], torch.Tensor]", _ops.batch_norm_moments.default)
batch_norm_finalize = cast("Callable[..., torch.Tensor]", _ops.batch_norm_finalize.default)
batch_norm_part_gradient_sums = cast(
    "Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]",
    _ops.batch_norm_part_gradient_sums.default,
)
batch_norm_part_input_gradient = cast(
    "Callable[..., torch.Tensor]", _ops.batch_norm_part_input_gradient.default
)
canonical_scope = cast("Callable[[str], str]", _ops.canonical_scope.default)
resolve_scope = cast("Callable[[str, str, int], str]", _ops.resolve_scope.default)
gather_samples = cast("Callable[[str, int], list[int]]", _ops.gather_samples.default)
available_kernels = cast("Callable[[], list[str]]", _ops.available_kernels.default)
default_kernels = cast("Callable[[], str]", _ops.default_kernels.default)
cuda = cast("Callable[[], str]", _ops.cuda.default)
transport = cast("Callable[[str], str]", _ops.transport.default)
forget_destroyed_groups = cast("Callable[[], None]", _ops.forget_destroyed_groups.default)
forget_groups = cast("Callable[[], None]", _ops.forget_groups.default)
know_process_group = cast("Callable[[str], None]", _ops.know_process_group.default)
communication_counters = cast(
    "Callable[[], tuple[int, int, float]]", _ops.communication_counters.default
)
message_bytes = cast("Callable[[int], int]", _ops.message_bytes.default)
host_identity = cast("Callable[[], int]", _ops.host_identity.default)
version = cast("Callable[[], str]", _ops.version.default)

# Compilers keep calls of these in the order of the program, and repeat none: ranks meet in them,
# or between two of keep_order.
for _op in (
    _ops.keep_order,
    _ops.batch_norm_backward,
    _ops.batch_norm_act_backward,
    _ops.batch_norm_double_backward,
):
    _register_effectful_op(_op.default, _EffectType.ORDERED)

# Whether layers in compiled graphs are one op each; see normscope.exact_graphs.
exact_graphs = os.environ.get("NORMSCOPE_EXACT_GRAPHS") == "1"


def batch_norm(
    *arguments: Any,  # noqa: ANN401 - as the user gave them
    scope: str,
    slice_stats: str,
    group: str,
    layer: str,
    **accumulated: torch.Tensor,
) -> torch.Tensor:
    """Call the op of training; the peers of a rank whose arguments do not reach it are told.

    Args:
        arguments: The op's first ones, up to ``dims``.
        scope: As the op's.
        slice_stats: As the op's.
        group: As the op's ``group_name``.
        layer: As the op's.
        accumulated: As the op's, if there is one.
    """
    try:
        if torch.compiler.is_compiling():
            y, _ = batch_norm_forward(
                *arguments,
                slice_stats,
                scope,
                group,
                layer,
                decompose=not exact_graphs,
                **accumulated,
            )
        else:
            y, _ = batch_norm_forward(*arguments, slice_stats, scope, group, layer, **accumulated)
    except (RuntimeError, TypeError) as error:
        # No others: checkpointing ends a recomputation by an exception of its own.
        tell_peers(error, scope, group)
        _name_transforms(error)
        raise
    return cast("torch.Tensor", y)


def batch_norm_act(
    activation: str,
    negative_slope: float,
    residual: torch.Tensor | None,
    *arguments: Any,  # noqa: ANN401 - as the user gave them
    scope: str,
    slice_stats: str,
    group: str,
    layer: str,
    **accumulated: torch.Tensor,
) -> torch.Tensor:
    """Call the op of training with an activation; as :func:`batch_norm`.

    Args:
        activation: As the op's.
        negative_slope: As the op's.
        residual: As the op's.
        arguments: Those of :func:`batch_norm`.
        scope: As the op's.
        slice_stats: As the op's.
        group: As the op's ``group_name``.
        layer: As the op's.
        accumulated: As the op's, if there is one.
    """
    try:
        y, _ = batch_norm_act_forward(
            activation,
            negative_slope,
            residual,
            *arguments,
            slice_stats,
            scope,
            group,
            layer,
            **accumulated,
        )
    except (RuntimeError, TypeError) as error:
        tell_peers(error, scope, group)
        _name_transforms(error)
        raise
    return cast("torch.Tensor", y)


# running_mean, running_var and num_batches_tracked.
Running = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def tell_peers(error: Exception, scope: str, group: str) -> None:
    """Tell the peers of a rank whose arguments did not reach the op."""
    # Errors of the library itself have told them what they need to know.
    if group and not isinstance(error, DistError):
        fail_exchange(scope, group, f"{type(error).__name__}: {error}")


def transforms() -> list[str]:
    """The transforms of torch.func that this call is in, the outermost first."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return [interpreter.key().name.lower() for interpreter in stack]


def _name_transforms(error: Exception) -> None:
    """Raise for a call in transforms of torch.func, of which torch says what it could not do."""
    unknown = isinstance(error, (DistError, NotImplementedError, TypeError))
    if unknown or torch.compiler.is_compiling() or not transforms():
        return
    raise RuntimeError(
        "normscope.batch_norm: expected no transform of torch.func around a layer in training, got "
        f"{', '.join(transforms())}; use torch.autograd.grad or torch.autograd.functional in place "
        "of grad, vjp and jacrev, a loop in place of vmap, or eval()"
    ) from error
