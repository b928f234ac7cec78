# SPDX-License-Identifier: Apache-2.0
"""Batch normalization with the activation that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.fx import Proxy

from normscope._binding.torch_private import has_hooks
from normscope.layers.batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, SliceStats
from normscope.layers.ending import Activated, Activation, unknown_activation
from normscope.layers.fx import call_of_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from normscope.layers.scope import Scope


# The attributes that only a layer with an activation has.
OWN_ATTRIBUTES = ("activation", "negative_slope")

# torch's modules that compute the same.
MODULES: Mapping[Activation, type[torch.nn.Module]] = {
    "relu": torch.nn.ReLU,
    "relu6": torch.nn.ReLU6,
    "leaky_relu": torch.nn.LeakyReLU,
    "silu": torch.nn.SiLU,
    "hard_swish": torch.nn.Hardswish,
}
_NAMES = {module_class: name for name, module_class in MODULES.items()}


def activation_of(module: torch.nn.Module) -> tuple[Activation, float] | None:
    """Return the activation that a module computes, and its slope, which only leaky_relu uses.

    Returns:
        None if a layer cannot compute it, or if calling the module does more than that.
    """
    activation = _NAMES.get(type(module))
    if activation is None or "forward" in vars(module) or has_hooks(module):
        return None
    return activation, float(getattr(module, "negative_slope", 0.01))


class BatchNormAct(BatchNorm):
    """Batch normalization, an optional addition of a residual, and an activation.

    Per channel::

        y = activation((x - mean) / sqrt(var + eps) * weight + bias + residual)

    Computes the same numbers as three separate modules, in training and in evaluation. The residual
    may have any shape and dtype: the sum is broadcast and promoted as in torch. Everything else is
    as in :class:`BatchNorm`.

    In training a single op does all of it, and keeps only x for backward, or x and y if there is a
    residual. Several ops with the same results are used in evaluation, under ``torch.compile``, for
    a sum that broadcasts or promotes, and for one before any activation other than ``relu``. SiLU
    is rounded differently from torch's, by up to 2 units in the last place.

    Args:
        num_features: C; every other argument up to ``dtype`` is as for :class:`BatchNorm`.
        eps: Added to the variance.
        momentum: Weight of the new statistics in the running ones; None for a cumulative average.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics.
        device: Device of the parameters and buffers.
        dtype: Dtype of the parameters and buffers.
        activation: ``relu``, ``relu6``, ``leaky_relu``, ``silu`` or ``hard_swish``, as defined by
            torch's function of that name.
        negative_slope: Slope of ``leaky_relu``; unused by the others.
        scope: Who shares statistics, as for :class:`BatchNorm`.
        process_group: The ranks that the scope refers to, as for :class:`BatchNorm`.
        slice_stats: How slices update the running statistics, as for :class:`BatchNorm`.
        keywords: Further arguments of the class in the installed torch.

    Attributes:
        activation: The name of the activation.
        negative_slope: Slope of ``leaky_relu``.

    Shape:
        - Input: [N, C, *]
        - Residual: same as the input, or broadcastable with it
        - Mask: as for :class:`BatchNorm`; the output is 0 where it is False
        - Output: same as the input, or larger if the residual is

    Raises:
        ValueError: If activation is none of those, or there is a mask and the residual is larger
            than the input; further as :class:`BatchNorm` raises it.
        RuntimeError: If the residual does not broadcast with the input or is on another device;
            further as :class:`BatchNorm` raises it.

    Example:
        >>> layer = BatchNormAct(3, activation="silu", scope="slices:2")
        >>> x = torch.randn(4, 3, 5)
        >>> layer(x, residual=x).shape
        torch.Size([4, 3, 5])
    """

    activation: Activation
    negative_slope: float

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
        activation: Activation = "relu",
        negative_slope: float = 0.01,
        scope: Scope | str = "world",
        process_group: ProcessGroup | DeviceMesh | None = None,
        slice_stats: SliceStats = "pooled",
        **keywords: Any,  # noqa: ANN401 - depends on the installed torch
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            scope=scope,
            process_group=process_group,
            slice_stats=slice_stats,
            **keywords,
        )
        if activation not in get_args(Activation):
            raise unknown_activation(activation)
        self.activation = activation
        self.negative_slope = negative_slope

    def forward(  # type: ignore[override] # takes more than torch's
        self,
        input: torch.Tensor,
        residual: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize ``input`` [N, C, *], add ``residual``, activate; 0 where ``mask`` is False."""
        if isinstance(input, Proxy):
            others = () if residual is None else (residual,)
            return call_of_module(self, input, *others, mask=mask)
        ending = Activated(self.activation, self.negative_slope, residual)
        if self.training:
            return self._train(input, mask, ending)
        if mask is None:
            return ending.finish(super().forward(input))
        return self._evaluate(input, mask, ending)

    def extra_repr(self) -> str:
        """Return the text of BatchNorm with the activation."""
        slope = f"({self.negative_slope})" if self.activation == "leaky_relu" else ""
        return f"{super().extra_repr()}, activation={self.activation}{slope}"


class BatchNormAct1d(BatchNormAct, BatchNorm1d):
    """:class:`BatchNormAct` for inputs [N, C] or [N, C, L].

    Arguments and errors are those of :class:`BatchNormAct`.

    Shape:
        - Input, and residual: [N, C] or [N, C, L]
        - Output: same as the input

    Example:
        >>> layer = BatchNormAct1d(3, activation="leaky_relu", negative_slope=0.2)
        >>> layer(torch.randn(4, 3)).shape
        torch.Size([4, 3])
    """


class BatchNormAct2d(BatchNormAct, BatchNorm2d):
    """:class:`BatchNormAct` for inputs [N, C, H, W].

    Arguments and errors are those of :class:`BatchNormAct`.

    Shape:
        - Input, and residual: [N, C, H, W]
        - Output: same as the input

    Example:
        >>> layer = BatchNormAct2d(3, scope="local")
        >>> layer(torch.randn(4, 3, 5, 5)).min() >= 0
        tensor(True)
    """


class BatchNormAct3d(BatchNormAct, BatchNorm3d):
    """:class:`BatchNormAct` for inputs [N, C, D, H, W].

    Arguments and errors are those of :class:`BatchNormAct`.

    Shape:
        - Input, and residual: [N, C, D, H, W]
        - Output: same as the input

    Example:
        >>> layer = BatchNormAct3d(3, activation="hard_swish")
        >>> layer(torch.randn(4, 3, 2, 5, 5)).shape
        torch.Size([4, 3, 2, 5, 5])
    """
