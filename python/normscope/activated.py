# SPDX-License-Identifier: Apache-2.0
"""Batch normalization with the activation that follows it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch.nn import functional

from normscope import _library
from normscope.modules import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, SliceStats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from normscope.scope import Scope

Activation = Literal["relu", "relu6", "leaky_relu", "silu", "hard_swish"]


class BatchNormAct(BatchNorm):
    """Batch normalization, an optional addition, and an activation, in one sweep.

        y = activation((x - mean) / sqrt(var + eps) * weight + bias + residual)

    Args:
        num_features: C; every other argument up to ``scope`` is that of :class:`BatchNorm`.
        activation: ``relu``, ``relu6``, ``leaky_relu``, ``silu`` or ``hard_swish``.
        negative_slope: Of ``leaky_relu``.
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
        process_group: ProcessGroup | None = None,
        slice_stats: SliceStats = "pooled",
        **keywords: Any,  # noqa: ANN401 - those of the installed torch
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
            raise ValueError(
                f"activation: expected one of {', '.join(get_args(Activation))}, got {activation!r}"
            )
        self.activation = activation
        self.negative_slope = negative_slope

    def forward(
        self, input: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalize ``input`` [N, C, *], add ``residual``, and activate."""
        if not self.training or torch.compiler.is_compiling() or not self._fuses(input, residual):
            y = super().forward(input)
            return self._activate(y if residual is None else y + residual)
        op = partial(_library.batch_norm_act, self.activation, self.negative_slope, residual)
        return self._train(input, op)

    def _fuses(self, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
        """Whether there is one op for it: not for all that torch's ``+`` takes."""
        if residual is None:
            return True
        is_like_x = (residual.shape, residual.dtype, residual.device) == (
            x.shape,
            x.dtype,
            x.device,
        )
        rises = self.activation in ("relu", "relu6") or (
            self.activation == "leaky_relu" and self.negative_slope >= 0
        )
        return is_like_x and rises

    def _activate(self, y: torch.Tensor) -> torch.Tensor:
        if self.activation == "leaky_relu":
            return functional.leaky_relu(y, self.negative_slope)
        return _ACTIVATIONS[self.activation](y)

    def extra_repr(self) -> str:
        """Torch's text, the scope, and the activation."""
        slope = f"({self.negative_slope})" if self.activation == "leaky_relu" else ""
        return f"{super().extra_repr()}, activation={self.activation}{slope}"


_ACTIVATIONS = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "hard_swish": functional.hardswish,
}


class BatchNormAct1d(BatchNormAct, BatchNorm1d):
    """:class:`BatchNormAct` of inputs [N, C] or [N, C, L]."""

    dims: ClassVar[tuple[int, ...]] = (2, 3)


class BatchNormAct2d(BatchNormAct, BatchNorm2d):
    """:class:`BatchNormAct` of inputs [N, C, H, W]."""

    dims: ClassVar[tuple[int, ...]] = (4,)


class BatchNormAct3d(BatchNormAct, BatchNorm3d):
    """:class:`BatchNormAct` of inputs [N, C, D, H, W]."""

    dims: ClassVar[tuple[int, ...]] = (5,)
