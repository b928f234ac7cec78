# SPDX-License-Identifier: Apache-2.0
"""Drop-in replacements for torch.nn.BatchNorm1d, 2d and 3d."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, get_args

import torch
from torch.fx import Proxy

from normscope._binding import groups
from normscope._binding.ops import FAILURES, ForwardArguments
from normscope._binding.torch_private import (
    TorchBatchNorm,
    let_data_parallel_take,
    watch_joins,
)
from normscope.layers import replicas
from normscope.layers.count import NO_ELEMENTS, Buffers, elements_in, state_of
from normscope.layers.earlier_scopes import EarlierScopes
from normscope.layers.ending import NOTHING, Ending
from normscope.layers.forward import (
    DIRECT,
    Route,
    check_dimensions,
    evaluate_masked,
    notify_peers_of_layer,
    scope_and_group_in_use,
)
from normscope.layers.fx import call_of_module
from normscope.layers.late_tracking import UntrackedForwards, updates_in_backward
from normscope.layers.scope import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

SliceStats = Literal["pooled", "first", "sequential"]

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")

# The attributes that copies of a layer do not get: they tell of its own buffers and forwards, and
# of the block or replica that it is in.
STATE = ("_count", "_route", "_made", "_earlier_scopes", "_untracked")

# Numbers the layers of this process as they are made: constructed, converted, copied or unpickled.
MADE = count()


class BatchNorm(TorchBatchNorm):
    """Batch normalization of inputs [N, C, *] with a statistics scope.

    Per channel, over the n elements of the norm batch that the scope defines::

        y = (x - mean) / sqrt(var + eps) * weight + bias

    A drop-in replacement for the batch normalization of ``torch.nn``, with the same arguments,
    attributes, defaults and ``state_dict``. The differences:

    * In training, the ranks of the scope share statistics: each forward and each backward is a
      collective, which all of them make in the same order. Evaluation is torch's own arithmetic. In
      evaluation, and with one rank or no process group, nothing is sent.
    * y, the input's gradient and the running statistics have the same bits for any number of ranks
      and threads, except on devices that use torch's kernels.
    * A call that raises updates nothing, not even ``num_batches_tracked``; nor does a norm batch
      without elements. "More than 1 value per channel" is required of the whole norm batch.
    * In training, parameters and running statistics are float32 or have the input's dtype.
    * The gradient can be differentiated once more, which is another collective: either all ranks
      of the scope do so, or none. A third derivative raises.
    * ``layer(x, mask=mask)`` excludes elements, for example padding, where the mask is False. y is
      0 there, and those elements affect neither statistics nor gradients.
    * A forward inside a backward, as in activation checkpointing, does not update the running
      statistics; see :func:`~normscope.checkpoint_context`.

    Args:
        num_features: C; followed by all other arguments of the installed torch's class, in order.
        eps: Added to the variance.
        momentum: Weight of the new statistics in the running ones; None for a cumulative average.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics.
        device: Device of the parameters and buffers.
        dtype: Dtype of the parameters and buffers.
        scope: Who shares statistics: a :class:`~normscope.Scope` or its text.
        process_group: The ranks that the scope refers to, or a mesh of one dimension; None for the
            default group at the time of the call, if there is one. The layer only stores the
            group's name, to be copied and pickled. A group with this name must exist wherever the
            layer is trained.
        slice_stats: How the slices of ``slices:K`` update the running statistics: ``pooled``, once
            with the moments of all slices; ``first``, with those of the first slice;
            ``sequential``, one by one, each of them counted in ``num_batches_tracked``.
        keywords: Further arguments of the class in the installed torch.

    Attributes:
        scope: Who shares statistics. A Scope or its text can be assigned at any time.
        slice_stats: How slices update the running statistics.
        group_name: The name of the process group; None for the default group.
        layer_name: The layer's qualified name, used in errors; ``convert`` sets it. Ranks tell
            layers with equal names apart by the order in which they made them.
        elements_seen: The number of elements that this rank has put into the running statistics
            since anything else last set them: a pooling over ranks, ``load_state_dict``, any write
            to the buffers or replacement of them. None if unknown: compiled graphs do not count,
            after them a write to the buffers by hand does not either, and torch hides a write
            through ``.data``, NumPy or a collective. On devices such a write is not noticed: assign
            0 after it. Not part of ``state_dict``.

    Shape:
        - Input: [N, C, *]
        - Mask: bool [N, 1, *], True where the input counts; None if all of it counts
        - Output: same as the input, with its dtype and memory format

    Raises:
        ValueError: If scope or slice_stats is malformed, the input has the wrong number of
            dimensions, the mask the wrong shape, dtype or device, or a norm batch has one value per
            channel.
        RuntimeError: If channels or dtypes do not match, or the ranks cannot exchange.

    Example:
        >>> layer = BatchNorm(3, scope="slices:2")
        >>> layer(torch.randn(4, 3, 5)).shape
        torch.Size([4, 3, 5])
        >>> layer(torch.ones(2, 3, 2), mask=torch.tensor([[[True, True]], [[False, False]]]))[1]
        tensor([[0., 0.],
                [0., 0.],
                [0., 0.]], grad_fn=<SelectBackward0>)
    """

    dims: ClassVar[tuple[int, ...]] = ()  # allowed numbers of dimensions; (): any from 2

    slice_stats: SliceStats
    group_name: str | None
    layer_name: str
    _made: int
    _count = NO_ELEMENTS
    _earlier_scopes: EarlierScopes | None = None
    _untracked: UntrackedForwards | None = None
    # pytorch-pfn-extras leaves layers alone that have it. It would change momentum to make two
    # updates, in a forward and its recomputation, equal to one.
    _bn_momentum_patched = True
    _applies_activation = False  # in a normscope.models.fusion.FusedSequential
    _route: Route = DIRECT  # another in blocks of accumulate and replicas of DataParallel

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
        **keywords: Any,  # noqa: ANN401 - depends on the installed torch
    ) -> None:
        keywords.update(device=device, dtype=dtype)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **keywords)
        if slice_stats not in get_args(SliceStats):
            raise ValueError(
                f"slice_stats: expected pooled, first or sequential, got {slice_stats!r}"
            )
        self.scope = scope
        self.slice_stats = slice_stats
        self.group_name = groups.name_of(process_group)
        self.layer_name = ""
        self._made = next(MADE)
        prepare_torch(self)

    @property
    def scope(self) -> Scope:
        """Who shares statistics."""
        return self._scope

    @scope.setter
    def scope(self, scope: Scope | str) -> None:
        before, self._scope = self.__dict__.get("_scope"), Scope(str(scope))
        if before is not None and before != self._scope:
            self._earlier_scopes = self._earlier_scopes or EarlierScopes()
            self._earlier_scopes.add(before)
        if not self._scope.is_of_one_rank:
            watch_joins()

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that the scope refers to; None for the default group.

        A group, or a ``torch.distributed`` DeviceMesh of one dimension, can be assigned.
        """
        return groups.named(self.group_name)

    @process_group.setter
    def process_group(self, group: ProcessGroup | DeviceMesh | None) -> None:
        self.group_name = groups.name_of(group)

    @property
    def elements_seen(self) -> int | None:
        """The number of elements in the running statistics since anything else last set them."""
        buffers = self._running()
        return elements_in(self._count, buffers, state_of(buffers, self._count))

    @elements_seen.setter
    def elements_seen(self, elements: int | None) -> None:
        buffers = self._running()
        self._count = elements, buffers, state_of(buffers, NO_ELEMENTS)

    def _running(self) -> Buffers:
        return self.running_mean, self.running_var, self.num_batches_tracked

    def reset_running_stats(self) -> None:
        """Set the running statistics to their initial values, without elements."""
        super().reset_running_stats()
        self._count = NO_ELEMENTS

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        *arguments: Any,  # noqa: ANN401 - torch's
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if any(prefix + name in state_dict for name in _RUNNING):
            self._count = NO_ELEMENTS

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize ``input`` [N, C, *] where ``mask`` [N, 1, *] is True; elsewhere y is 0."""
        if isinstance(input, Proxy):
            return call_of_module(self, input, mask=mask)
        if self.training:
            return self._train(input, mask, NOTHING)
        if mask is None:
            return TorchBatchNorm.forward(self, input)  # not that of torch.nn.SyncBatchNorm
        return self._evaluate(input, mask, NOTHING)

    def _evaluate(self, x: torch.Tensor, mask: torch.Tensor, ending: Ending) -> torch.Tensor:
        self._check_input_dim(x)
        running = self.running_mean, self.running_var
        return evaluate_masked(x, mask, *running, self.weight, self.bias, self.eps, ending)

    def _train(self, x: torch.Tensor, mask: torch.Tensor | None, ending: Ending) -> torch.Tensor:
        try:
            arguments = self._forward_arguments(x)
        except FAILURES as error:  # such as a parameter that was deleted
            notify_peers_of_layer(error, x, self._scope, self.group_name, self.layer_name)
            raise
        if not self.track_running_stats:
            self._note_untracked()
            return self._route.train(None, x, mask, arguments, ending)
        if self._untracked is None or torch.compiler.is_compiling() or not self._untracked.take():
            return self._route.train(self, x, mask, arguments, ending)
        with updates_in_backward():
            return self._route.train(self, x, mask, arguments, ending)

    def _note_untracked(self) -> None:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.running_mean is None:
            return
        self._untracked = self._untracked or UntrackedForwards()
        self._untracked.add()

    def _forward_arguments(self, x: torch.Tensor) -> ForwardArguments:
        own_scope = self._scope
        if not torch.compiler.is_compiling() and self._earlier_scopes is not None:
            own_scope = self._earlier_scopes.in_use(own_scope)
        scope, group = scope_and_group_in_use(own_scope, self.group_name, x)
        name = self.layer_name
        if group and not own_scope.is_of_one_rank:
            if not name:
                self.layer_name = name = groups.name_of_layer(group, self._made)
            name = groups.name_in_exchange(group, scope, name, self._made)
        # Read from the dicts, because attribute access of torch.nn.Module is slow.
        parameters, buffers = self._parameters, self._buffers
        tracks = self.track_running_stats
        mean = var = batches = None
        try:
            weight, bias = parameters["weight"], parameters["bias"]
            if tracks:
                mean, var = buffers["running_mean"], buffers["running_var"]
                batches = buffers["num_batches_tracked"]
        except KeyError:  # parametrized tensors, and those of replicas, are plain attributes
            weight, bias = self.weight, self.bias
            if tracks:
                mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        return ForwardArguments(
            weight,
            bias,
            mean,
            var,
            batches,
            self.momentum,
            self.eps,
            self.dims,
            self.slice_stats,
            scope,
            group,
            name,
        )

    def _check_input_dim(self, input: torch.Tensor) -> None:  # in evaluation
        check_dimensions(input, self.dims)

    def _replicate_for_data_parallel(self) -> BatchNorm:
        replica: BatchNorm = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._route = replicas.route_of_replica(self)
        return replica

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this for every layer of a model."""
        raise TypeError(
            f"{self.layer_name or 'torch.jit.script'}: expected a layer of torch.nn, got a "
            f"{type(self).__name__} of normscope, which TorchScript cannot compile; script "
            "normscope.to_torch(model), which evaluates the same, or use torch.export"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in vars(self).items() if key not in STATE}
        return {**state, "elements_seen": self.elements_seen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        elements = state.pop("elements_seen", 0)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.elements_seen = elements
        self._made = next(MADE)
        prepare_torch(self)

    def extra_repr(self) -> str:
        """Return the text of torch's layer with the scope."""
        return f"{super().extra_repr()}, scope={self.scope}"  # type: ignore[no-untyped-call]


def prepare_torch(layer: BatchNorm) -> None:
    """Change in torch what a layer needs; to be called for each layer that is made."""
    if isinstance(layer, torch.nn.SyncBatchNorm):
        let_data_parallel_take(BatchNorm)
    if not layer.scope.is_of_one_rank:
        watch_joins()


class BatchNorm1d(BatchNorm, torch.nn.BatchNorm1d):
    """:class:`BatchNorm` for inputs [N, C] or [N, C, L]; replaces torch.nn.BatchNorm1d.

    Arguments, errors and differences from torch are those of :class:`BatchNorm`.

    Shape:
        - Input: [N, C] or [N, C, L]
        - Output: same as the input

    Example:
        >>> layer = BatchNorm1d(3)
        >>> layer.scope
        Scope(text='world')
        >>> layer(torch.randn(4, 3)).shape
        torch.Size([4, 3])
    """

    dims: ClassVar[tuple[int, ...]] = (2, 3)


class BatchNorm2d(BatchNorm, torch.nn.BatchNorm2d):
    """:class:`BatchNorm` for inputs [N, C, H, W]; replaces torch.nn.BatchNorm2d.

    Arguments, errors and differences from torch are those of :class:`BatchNorm`.

    Shape:
        - Input: [N, C, H, W]
        - Output: same as the input

    Example:
        >>> layer = BatchNorm2d(3, scope="local")
        >>> layer(torch.randn(4, 3, 5, 5)).shape
        torch.Size([4, 3, 5, 5])
    """

    dims: ClassVar[tuple[int, ...]] = (4,)


class BatchNorm3d(BatchNorm, torch.nn.BatchNorm3d):
    """:class:`BatchNorm` for inputs [N, C, D, H, W]; replaces torch.nn.BatchNorm3d.

    Arguments, errors and differences from torch are those of :class:`BatchNorm`.

    Shape:
        - Input: [N, C, D, H, W]
        - Output: same as the input

    Example:
        >>> layer = BatchNorm3d(3, scope="slices:4", slice_stats="first")
        >>> layer(torch.randn(4, 3, 2, 5, 5)).shape
        torch.Size([4, 3, 2, 5, 5])
    """

    dims: ClassVar[tuple[int, ...]] = (5,)
