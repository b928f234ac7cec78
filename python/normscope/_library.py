# SPDX-License-Identifier: Apache-2.0
"""The ops of the C++ library, with types."""

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

# torch.distributed.DistError, which not every build of torch has.
DistError: type[Exception] = torch._C._DistError

# Loaded by normscope._compiled.
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
divide_ranks = cast(
    "Callable[[str, int, list[int]], tuple[str, list[int]]]", _ops.divide_ranks.default
)
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

# Ranks exchange in these ops, or between two calls of keep_order. Compilers must keep the calls in
# program order and repeat none.
for _op in (
    _ops.keep_order,
    _ops.batch_norm_backward,
    _ops.batch_norm_act_backward,
    _ops.batch_norm_double_backward,
):
    _register_effectful_op(_op.default, _EffectType.ORDERED)

# Whether each layer in a compiled graph is a single op; see normscope.exact_graphs.
exact_graphs = os.environ.get("NORMSCOPE_EXACT_GRAPHS") == "1"


def batch_norm(
    *arguments: Any,  # noqa: ANN401 - as the user gave them
    scope: str,
    slice_stats: str,
    group: str,
    layer: str,
    **accumulated: torch.Tensor,
) -> torch.Tensor:
    """Call the training op; if the arguments do not reach it, tell the other ranks.

    Args:
        arguments: The first arguments of the op, up to ``dims``.
        scope: As for the op.
        slice_stats: As for the op.
        group: The op's ``group_name``.
        layer: As for the op.
        accumulated: The op's argument of this name, if given.
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
        # Only these: checkpointing ends a recomputation with an exception of its own.
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
    """Call the training op with an activation, in the same way as :func:`batch_norm`.

    Args:
        activation: As for the op.
        negative_slope: As for the op.
        residual: As for the op.
        arguments: As for :func:`batch_norm`.
        scope: As for the op.
        slice_stats: As for the op.
        group: The op's ``group_name``.
        layer: As for the op.
        accumulated: The op's argument of this name, if given.
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
    """Tell the other ranks that the arguments of this rank did not reach the op."""
    # The library's own errors have already told them.
    if group and not isinstance(error, DistError):
        fail_exchange(scope, group, f"{type(error).__name__}: {error}")


def transforms() -> list[str]:
    """Return the torch.func transforms around the current call, outermost first."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return [interpreter.key().name.lower() for interpreter in stack]


def _name_transforms(error: Exception) -> None:
    """Raise an error that names the torch.func transforms around the call, if there are any."""
    unknown = isinstance(error, (DistError, NotImplementedError, TypeError))
    if unknown or torch.compiler.is_compiling() or not transforms():
        return
    raise RuntimeError(
        "normscope.batch_norm: expected no transform of torch.func around a layer in training, got "
        f"{', '.join(transforms())}; use torch.autograd.grad or torch.autograd.functional in place "
        "of grad, vjp and jacrev, a loop in place of vmap, or eval()"
    ) from error
