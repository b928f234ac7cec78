# SPDX-License-Identifier: Apache-2.0
"""Drop-in replacements for torch.nn.BatchNorm1d, 2d and 3d."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm

from normscope import _library, _process_group, _replicas
from normscope._fx import call_of_module
from normscope._masked import MaskedOp, normalize_alone, normalize_filled, recomputes
from normscope._rows import Residual
from normscope._scripted import evaluated, filled
from normscope.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from normscope.accumulation import _Accumulator

SliceStats = Literal["pooled", "first", "sequential"]


class BatchNorm(_BatchNorm):
    """Batch normalization of inputs [N, C, *] whose statistics have a scope.

    Per channel, over the n elements of the norm batch that the scope chooses:

        y = (x - mean) / sqrt(var + eps) * weight + bias

    A drop-in for the batch normalization of ``torch.nn``, with its arguments, attributes, defaults
    and ``state_dict``. The differences:

    * In training, the ranks of the scope share statistics: each forward and each backward is a
      collective, which all of them make in the same order. Evaluation is torch's own arithmetic;
      there, and where there is one rank or no process group, nothing is sent.
    * y, the input's gradient and the running statistics have the same bits for any number of ranks
      and threads.
    * A call that raises updates nothing, ``num_batches_tracked`` included; nor does a norm batch
      without elements. "More than 1 value per channel" is asked of the whole norm batch.
    * In training, parameters and running statistics are float32 or of the input's dtype.
    * The gradient can be differentiated once more, which is a collective of its own: all ranks of
      the scope do so, or none. A third derivative raises.
    * ``layer(x, mask=mask)`` leaves out what the mask does not keep: padding, for example. y is 0
      there, and nothing that lies there reaches a statistic or a gradient.
    * A forward inside a backward, as activation checkpointing makes it, leaves the running
      statistics alone; see :func:`~normscope.checkpoint_context`.

    Args:
        num_features: C; every other argument of the installed torch's class follows, in its order.
        eps: What is added to the variance.
        momentum: Weight of the new statistics in the running ones; None: all have the same.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics.
        device: Of the parameters and buffers.
        dtype: Of the parameters and buffers.
        scope: Who shares statistics: a :class:`~normscope.Scope` or its text.
        process_group: The ranks that the scope speaks of, or a mesh of one dimension; None for the
            default group of the time of the call, if there is one. The layer keeps its name alone,
            so that it can be copied and pickled; the name must stand for a group wherever the layer
            then trains.
        slice_stats: How the slices of ``slices:K`` update the running statistics: ``pooled``, once
            with the moments of all of them; ``first``, with the first slice's; ``sequential``, one
            after the other, each of which counts in ``num_batches_tracked``.
        keywords: What else the installed torch's class takes.

    Attributes:
        scope: Who shares statistics; it can be assigned to at any time, as a Scope or its text.
        slice_stats: How slices update the running statistics.
        group_name: The name of the process group; None for the default group.
        layer_name: The layer's qualified name, by which errors call it; ``convert`` gives it.
        elements_seen: Elements that this rank has put into the running statistics since they were
            last pooled over ranks; None where that is not known: a compiled graph does not count.
            No part of ``state_dict``.

    Shape:
        - Input: [N, C, *]
        - Mask: bool [N, 1, *], True where the input counts; None if it all does
        - Output: that of the input, in its dtype and memory format

    Raises:
        ValueError: If scope or slice_stats is malformed, the input has another number of
            dimensions, the mask another shape, dtype or device, or a norm batch has one value per
            channel.
        RuntimeError: If channels or dtypes do not fit, or the ranks cannot exchange.

    Example:
        >>> layer = BatchNorm(3, scope="slices:2")
        >>> layer(torch.randn(4, 3, 5)).shape
        torch.Size([4, 3, 5])
        >>> layer(torch.ones(2, 3, 2), mask=torch.tensor([[[True, True]], [[False, False]]]))[1]
        tensor([[0., 0.],
                [0., 0.],
                [0., 0.]], grad_fn=<SelectBackward0>)
    """

    dims: ClassVar[tuple[int, ...]] = ()  # that an input may have; (): any from 2

    slice_stats: SliceStats
    group_name: str | None
    layer_name: str
    elements_seen: int | None = 0
    _accumulator: _Accumulator | None = None  # in a block of accumulate
    _meeting: _replicas.Meeting | None = None  # of a replica of torch.nn.DataParallel

    # What is of no type that TorchScript knows; evaluation needs none of it.
    __jit_ignored_attributes__: ClassVar[list[str]] = [
        "slice_stats",
        "group_name",
        "layer_name",
        "elements_seen",
        "_accumulator",
    ]
    __jit_unused_properties__: ClassVar[list[str]] = ["scope", "process_group"]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        track_running_stats: bool = True,  # noqa: FBT001, FBT002
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        *,
        scope: Scope | str = "world",
        process_group: ProcessGroup | DeviceMesh | None = None,
        slice_stats: SliceStats = "pooled",
        **keywords: Any,  # noqa: ANN401 - those of the installed torch
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, **keywords
        )
        if slice_stats not in get_args(SliceStats):
            raise ValueError(
                f"slice_stats: expected pooled, first or sequential, got {slice_stats!r}"
            )
        self.scope = scope
        self.slice_stats = slice_stats
        self.group_name = _process_group.name_of(process_group)
        self.layer_name = ""

    @property
    def scope(self) -> Scope:
        """Who shares statistics."""
        return self._scope

    @scope.setter
    def scope(self, scope: Scope | str) -> None:
        self._scope = Scope(str(scope))

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that the scope speaks of, as torch.nn.SyncBatchNorm's; None: the default group.

        A group, or a ``torch.distributed`` DeviceMesh of one dimension, can be assigned.
        """
        return _process_group.named(self.group_name)

    @process_group.setter
    def process_group(self, group: ProcessGroup | DeviceMesh | None) -> None:
        self.group_name = _process_group.name_of(group)

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize ``input`` [N, C, *], where ``mask`` [N, 1, *] is True; else y is 0."""
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            if isinstance(input, Proxy):
                return call_of_module(self, input, mask=mask)
            if mask is not None:
                return self._normalize_masked(input, mask, None)
            if not self.training:
                return super().forward(input)
            return self._train(input, _library.batch_norm)
        y = evaluated(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.eps,
            mask,
        )
        return y if mask is None else filled(y, mask)

    def _normalize_masked(
        self, x: torch.Tensor, mask: torch.Tensor, residual: Residual
    ) -> torch.Tensor:
        if self.training:
            return self._train(x, MaskedOp(mask, self._op, self._finish, residual))
        self._check_input_dim(x)
        if self.running_mean is not None or self.running_var is not None:
            return normalize_filled(x, mask, residual, self._evaluate)
        return normalize_alone(x, mask, residual, self, self._finish)

    def _op(self, x: torch.Tensor, residual: Residual) -> Callable[..., torch.Tensor]:
        """The op of training for an input, or a part of it, and what is added to its output."""
        return _library.batch_norm

    def _finish(self, y: torch.Tensor, residual: Residual) -> torch.Tensor:
        """What follows on the normalization."""
        return y

    def _evaluate(self, x: torch.Tensor, residual: Residual) -> torch.Tensor:
        return self._finish(super().forward(x), residual)

    def _train(self, input: torch.Tensor, op: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Normalize ``input`` by an op, with the arguments that all ops of training take."""
        scope, group_name = _process_group.scope_and_group_in_use(
            self._scope, self.group_name, input
        )
        if self._meeting is not None and not Scope(scope).is_of_one_rank:
            if not isinstance(op, MaskedOp):
                return self._meeting.normalize(self, input, scope, group_name)
            y = self._meeting.normalize(self, input, scope, group_name, op.mask)
            return op.finish(y)
        if not self.layer_name and group_name and not self._scope.is_of_one_rank:
            self.layer_name = _process_group.name_of_layer(group_name)
        # From where they are: torch.nn.Module takes long to find attributes.
        parameters, buffers = self._parameters, self._buffers
        has_statistics = self.track_running_stats
        try:
            weight, bias = parameters["weight"], parameters["bias"]
            running_mean = buffers["running_mean"] if has_statistics else None
            running_var = buffers["running_var"] if has_statistics else None
            num_batches_tracked = buffers["num_batches_tracked"] if has_statistics else None
        except KeyError:  # parametrized ones, and those of replicas, are attributes
            weight, bias = self.weight, self.bias
            running_mean = self.running_mean if has_statistics else None
            running_var = self.running_var if has_statistics else None
            num_batches_tracked = self.num_batches_tracked if has_statistics else None
        accumulator, moments = self._accumulator, {}
        if accumulator is not None:
            running_mean = running_var = num_batches_tracked = None
            moments = {"accumulated": accumulator.moments}
        y = op(
            input,
            weight,
            bias,
            running_mean,
            running_var,
            num_batches_tracked,
            self.momentum,
            self.eps,
            self.dims,
            scope=scope,
            slice_stats=self.slice_stats,
            group=group_name,
            layer=self.layer_name,
            **moments,
        )
        if has_statistics:
            self._count_elements(input, op)
        return y

    def _check_input_dim(self, input: torch.Tensor) -> None:  # in evaluation; the op's text
        if input.dim() < 2:
            raise ValueError(f"x: expected at least 2 dimensions, got {input.dim()}")
        if self.dims and input.dim() not in self.dims:
            wanted = " or ".join(map(str, self.dims))
            raise ValueError(f"x: expected {wanted} dimensions, got {input.dim()}")

    def _replicate_for_data_parallel(self) -> BatchNorm:
        replica: BatchNorm = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._meeting = _replicas.open_meeting(self)
        is_first = replica._meeting.join(replica)
        if not is_first:
            replica._accumulator = None  # as its buffers, what it counts would be lost
        return replica

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_accumulator", None)  # a copy is in no block
        return state

    def _count_elements(self, x: torch.Tensor, op: Callable[..., torch.Tensor]) -> None:
        counter = self if self._accumulator is None else self._accumulator
        if torch.compiler.is_compiling():
            counter.elements_seen = None  # a graph that held the count would be compiled every step
        elif counter.elements_seen is not None and not recomputes():
            elements = op.elements if isinstance(op, MaskedOp) else x.numel()
            # torch.nn.Module's own assignment takes microseconds.
            object.__setattr__(counter, "elements_seen", counter.elements_seen + elements)

    def extra_repr(self) -> str:
        """Torch's text, and the scope."""
        return f"{super().extra_repr()}, scope={self.scope}"  # type: ignore[no-untyped-call]


class BatchNorm1d(BatchNorm, torch.nn.BatchNorm1d):
    """:class:`BatchNorm` of inputs [N, C] or [N, C, L], a drop-in for torch.nn.BatchNorm1d.

    Arguments, errors and differences from torch are those of :class:`BatchNorm`.

    Shape:
        - Input: [N, C] or [N, C, L]
        - Output: that of the input

    Example:
        >>> layer = BatchNorm1d(3)
        >>> layer.scope
        Scope(text='world')
        >>> layer(torch.randn(4, 3)).shape
        torch.Size([4, 3])
    """

    dims: ClassVar[tuple[int, ...]] = (2, 3)


class BatchNorm2d(BatchNorm, torch.nn.BatchNorm2d):
    """:class:`BatchNorm` of inputs [N, C, H, W], a drop-in for torch.nn.BatchNorm2d.

    Arguments, errors and differences from torch are those of :class:`BatchNorm`.

    Shape:
        - Input: [N, C, H, W]
        - Output: that of the input

    Example:
        >>> layer = BatchNorm2d(3, scope="local")
        >>> layer(torch.randn(4, 3, 5, 5)).shape
        torch.Size([4, 3, 5, 5])
    """

    dims: ClassVar[tuple[int, ...]] = (4,)


class BatchNorm3d(BatchNorm, torch.nn.BatchNorm3d):
    """:class:`BatchNorm` of inputs [N, C, D, H, W], a drop-in for torch.nn.BatchNorm3d.

    Arguments, errors and differences from torch are those of :class:`BatchNorm`.

    Shape:
        - Input: [N, C, D, H, W]
        - Output: that of the input

    Example:
        >>> layer = BatchNorm3d(3, scope="slices:4", slice_stats="first")
        >>> layer(torch.randn(4, 3, 2, 5, 5)).shape
        torch.Size([4, 3, 2, 5, 5])
    """

    dims: ClassVar[tuple[int, ...]] = (5,)
