# SPDX-License-Identifier: Apache-2.0
"""The ops of the C++ library, with types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from normscope._binding.torch_private import (
    ORDERED,
    DistError,
    interpreter_stack,
    is_exporting,
    register_effectful_op,
)

_ops = torch.ops.normscope

batch_norm_forward = _ops.batch_norm_forward.default
batch_was_counted = cast("Callable[[], bool]", _ops.batch_was_counted.default)
set_updates_in_backward = cast("Callable[[bool], bool]", _ops.set_updates_in_backward.default)
set_detect_non_finite = cast("Callable[[bool], bool]", _ops.set_detect_non_finite.default)
gather = cast("Callable[[torch.Tensor, str, str], torch.Tensor]", _ops.gather.default)
random_cotangents = cast(
    "Callable[[list[torch.Tensor], int, str, int, int], tuple[list[torch.Tensor], float]]",
    _ops.random_cotangents.default,
)
output_noise = cast("Callable[..., torch.Tensor]", _ops.output_noise.default)
choose_scopes = cast("Callable[..., tuple[Any, ...]]", _ops.choose_scopes.default)
fail_exchanges = cast("Callable[..., None]", _ops.fail_exchanges.default)
# The status, and what has happened to another rank of a group.
status_of_process = cast("Callable[[int], tuple[str, str]]", _ops.status_of_process.default)
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
resolve_scope = cast("Callable[[str, str, int | None], str]", _ops.resolve_scope.default)
divide_ranks = cast(
    "Callable[[str, int, list[int]], tuple[str, list[int]]]", _ops.divide_ranks.default
)
note_change_of_scope = cast("Callable[[], int]", _ops.note_change_of_scope.default)
change_before_forward = cast("Callable[[], int]", _ops.change_before_forward.default)
forget_groups = cast("Callable[..., None]", _ops.forget_groups.default)
know_process_group = cast("Callable[[str], None]", _ops.know_process_group.default)
communication_counters = cast(
    "Callable[[], tuple[int, int, float]]", _ops.communication_counters.default
)

# Ranks exchange in these ops, or between two calls of keep_order. Compilers must keep the calls in
# program order and repeat none.
for _op in (
    _ops.keep_order,
    _ops.batch_norm_backward,
    _ops.batch_norm_double_backward,
):
    register_effectful_op(_op.default, ORDERED)

# What a call that fails may raise. Not Exception: checkpointing ends a recomputation by one.
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, MemoryError)


class Settings(NamedTuple):
    """What does not depend on a call.

    Args:
        version: Of the C++ library.
        recorder: What decides how a graph records a layer: the version, and the kernels at hand.
        limits_of_scopes: The numbers of normscope/core/scope_choice.h.
        exact_graphs: Whether each layer in a compiled graph is a single op; see
            normscope.training.exact_graphs.
        time_limit: For an exchange, in seconds; None for that of the group.
        host: A number of 52 bits that is the same for all ranks of a host.
    """

    version: str
    recorder: str
    limits_of_scopes: list[float]
    exact_graphs: bool
    time_limit: float | None
    host: int


def settings() -> Settings:
    """Read the settings, and check all environment variables."""
    return Settings(*_ops.settings.default())


# The call checks the variables before any rank waits for another.
version, _recorder, limits_of_scopes, exact_graphs, *_ = settings()


class Installation(NamedTuple):
    """What ``python -m normscope`` shows.

    Args:
        kernels: The names of the kernels that run on this host.
        in_use: The name of those that it uses.
        cuda: Whether the CUDA kernels are built, and can run.
        of_devices: What normalizes on each of the given devices.
    """

    kernels: list[str]
    in_use: str
    cuda: str
    of_devices: list[str]


def installation(devices: list[str]) -> Installation:
    """Describe the installation; chooses the kernels for good, and may start CUDA's driver."""
    return Installation(*_ops.installation.default(devices))


class ForwardArguments(NamedTuple):
    """The arguments of a training forward after x, in the order of the op.

    Args:
        weight: [C].
        bias: [C].
        running_mean: [C]; updated, as are the next two. None for none.
        running_var: [C].
        num_batches_tracked: The number of updates.
        momentum: Weight of the new statistics in the running ones; None for a cumulative average.
        eps: Added to the variance.
        dims: The numbers of dimensions that x may have; () for any.
        slice_stats: How slices update the running statistics.
        scope: Who shares statistics.
        group: The name of the process group; "" for none.
        layer: The layer's name, used in errors; "" for none.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None
    momentum: float | None
    eps: float
    dims: tuple[int, ...]
    slice_stats: str
    scope: str
    group: str
    layer: str

    def without_running(self) -> ForwardArguments:
        """Return the same arguments without running statistics."""
        # After a graph break, the compiler of torch 2.11 does not restore what _replace() returns.
        return ForwardArguments(self.weight, self.bias, None, None, None, *self[5:])

    def slices(self) -> int | None:
        """Return K of the scope ``slices:K``; None for other scopes."""
        kind, _, count = self.scope.partition(":")
        return int(count) if kind == "slices" else None

    def updates_running(self) -> bool:
        """Return whether the forward changes running statistics, if the norm batch has elements."""
        return self.running_mean is not None and self.momentum != 0


def batch_norm(
    x: torch.Tensor,
    arguments: ForwardArguments,
    accumulated: torch.Tensor | None = None,
    **others: Any,  # noqa: ANN401 - the op has types
) -> torch.Tensor:
    """Call the training op; if the arguments do not reach it, notify the other ranks.

    The moments of the norm batch are added to ``accumulated``. ``others`` are arguments of the op
    for what follows the normalization; graphs give none.
    """
    y: torch.Tensor
    if accumulated is not None:  # an argument that is not needed takes time, too
        others["accumulated"] = accumulated
    if torch.compiler.is_compiling():
        others["graph"] = _recorded_as()
    try:
        y = batch_norm_forward(x, *arguments, **others)[0]
    except (RuntimeError, TypeError, KeyError) as error:
        # The op has notified them of its ValueErrors, or all ranks have found them together.
        notify_peers(error, arguments.scope, arguments.group)
        name_input(error, x, arguments.layer)
        _name_mutation_of_saved_tensors(error, arguments.layer)
        _name_distributed(error, {"x": x, **arguments._asdict(), **others})
        _name_transforms(error)
        raise
    return y


class Staged:
    """Copies of a forward's buffers, for one of several steps of which the last ones may raise too.

    Attributes:
        arguments: The given arguments, with copies of the buffers.
        accumulated: A copy of the moments, if there are any.
    """

    def __init__(self, arguments: ForwardArguments, accumulated: torch.Tensor | None) -> None:
        self._buffers = (*arguments[2:5], accumulated)
        copies = [None if buffer is None else buffer.clone() for buffer in self._buffers]
        running_mean, running_var, num_batches_tracked, self.accumulated = copies
        self.arguments = arguments._replace(
            running_mean=running_mean,
            running_var=running_var,
            num_batches_tracked=num_batches_tracked,
        )

    def write_back(self) -> None:
        """Write the copies back, once the forward has succeeded; not in a recomputation."""
        if batch_was_counted():
            return
        for buffer, value in zip(
            self._buffers, (*self.arguments[2:5], self.accumulated), strict=True
        ):
            if buffer is not None and value is not None:
                buffer.detach().copy_(value)


def _recorded_as() -> str:
    """Return how the graph of a compiler or torch.export records the op; see calls/recording.h."""
    if is_exporting():
        return "exported"
    return f"exact {_recorder}" if exact_graphs else f"fused {_recorder}"


def activations_are_in_ops() -> bool:
    """Return whether layers in graphs apply activations; otherwise the compiler fuses both."""
    return exact_graphs and not is_exporting()


def message_bytes(channels: int) -> int:
    """Return how many bytes a rank sends in a forward or a backward."""
    return batch_norm_moments(torch.empty(0, channels, device="meta")).nbytes


def no_moments(channels: int, device: torch.device) -> torch.Tensor:
    """Return the moments of no elements, to which others can be added."""
    return batch_norm_moments(torch.empty(0, channels, device=device))


def gather_numbers(numbers: list[float], group: str, name: str) -> list[list[float]]:
    """Return the numbers of each rank, in rank order; all ranks give as many.

    Args:
        numbers: This rank's; a float64 has to represent them.
        group: The name of the process group.
        name: What is gathered, used in errors.
    """
    with notifying_peers("world", group):
        # Whatever the default device and dtype are.
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return cast("list[list[float]]", gather(own, group, name).tolist())


def reason_of(error: BaseException) -> str:
    """Return the text of an error for other ranks; no op takes lone surrogates."""
    text = f"{type(error).__name__}: {error}"
    return text.encode(errors="backslashreplace").decode()


def notify_peers(error: BaseException, scope: str, group: str, prefix: str = "") -> None:
    """Notify the other ranks that the arguments of this rank did not reach the op.

    Args:
        error: The reason.
        scope: The scope of the op.
        group: The name of its process group; "" for none.
        prefix: Names other code as the origin of the error; "" if there is none.
    """
    # They have been notified of the library's own errors, except of those of other code.
    if group and (prefix or not isinstance(error, DistError)):
        fail_exchanges(prefix + reason_of(error), scope=scope, group_name=group)


def name_input(error: Exception, x: object, layer: str) -> None:
    """Raise an error that names the layer, if its input is no strided tensor."""
    expected = f"{layer or 'normscope.batch_norm'}: expected a strided tensor for x in training"
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{expected}, got {type(x).__name__}") from error
    if x.is_nested:
        raise TypeError(
            f"{expected}, got a nested one; pad it, and give the layer a mask"
        ) from error
    if x.layout != torch.strided:
        raise TypeError(f"{expected}, got one of {x.layout}") from error


@contextmanager
def notifying_peers(
    scope: str,
    group: str,
    errors: type[BaseException] | tuple[type[BaseException], ...] = FAILURES,
    prefix: str = "",
) -> Iterator[None]:
    """Notify the other ranks if a block before or after an op raises one of the errors."""
    try:
        yield
    except errors as error:
        notify_peers(error, scope, group, prefix)
        raise


def transforms() -> list[str]:
    """Return the torch.func transforms around the current call, outermost first."""
    stack = interpreter_stack() or []
    return [interpreter.key().name.lower() for interpreter in stack]


def _name_distributed(error: Exception, given: dict[str, Any]) -> None:
    """Raise an error that names the tensors of torch.distributed.tensor, if there are any."""
    names = [name for name, value in given.items() if hasattr(value, "to_local")]
    if names:
        raise RuntimeError(
            f"{given['layer'] or 'normscope.batch_norm'}: expected plain tensors for a layer of "
            f"normscope in training, got a DTensor for {', '.join(names)}; call it on x.to_local() "
            "and do not distribute its parameters and buffers"
        ) from error


def _name_mutation_of_saved_tensors(error: Exception, layer: str) -> None:
    """Raise an error that names torch's mode for such mutations, if it caused the error.

    It expects every op to have ``out`` that takes an argument to write to by keyword.
    """
    if isinstance(error, KeyError) and error.args == ("out",):
        raise RuntimeError(
            f"{layer or 'normscope.batch_norm'}: expected no "
            "torch.autograd.graph.allow_mutation_on_saved_tensors() around a layer of normscope in "
            "training, got one; leave it, and clone the tensors that are changed in place"
        ) from error


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
