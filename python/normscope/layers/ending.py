# SPDX-License-Identifier: Apache-2.0
"""The ending of a layer, after its normalization: nothing, or an addition and an activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.nn import functional

from normscope._binding import ops
from normscope._binding.ops import ForwardArguments
from normscope.layers.masks import Residual, broadcast

Activation = Literal["relu", "relu6", "leaky_relu", "silu", "hard_swish"]


def unknown_activation(activation: str) -> ValueError:
    """Return the error for a name that is not one of Activation."""
    return ValueError(
        f"activation: expected one of {', '.join(get_args(Activation))}, got {activation!r}"
    )


class Ending:
    """Nothing."""

    def train(
        self,
        x: torch.Tensor,
        arguments: ForwardArguments,
        accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize ``x`` as :func:`normscope._binding.ops.batch_norm`, and apply the ending."""
        return ops.batch_norm(x, arguments, accumulated)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Apply the ending to ``y``, the output of the normalization."""
        return y

    def with_residual(
        self, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Ending:
        """Return the ending with the residual expanded to the shape of ``x``, then changed."""
        return self

    def check_shapes(self, x: torch.Tensor) -> None:
        """Raise an error if what is added does not fit a tensor like ``x``."""

    def split(self, sizes: list[int]) -> list[Ending]:
        """Return the ending for each part of the rows."""
        return [self] * len(sizes)


NOTHING = Ending()


@dataclass(slots=True)
class Activated(Ending):
    """The addition of a residual, and an activation.

    Args:
        activation: The name of the activation.
        negative_slope: Slope of ``leaky_relu``.
        residual: Added before the activation; None for nothing.
    """

    activation: Activation
    negative_slope: float
    residual: Residual = None

    def train(
        self,
        x: torch.Tensor,
        arguments: ForwardArguments,
        accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Use the op that does all of it, or else do one after the other."""
        is_one_op = self._is_one_op(x)
        if torch.compiler.is_compiling() and not (is_one_op and ops.activations_are_in_ops()):
            return self.finish(ops.batch_norm(x, arguments, accumulated))
        if not is_one_op:
            with ops.notifying_peers(arguments.scope, arguments.group):
                staged = ops.Staged(arguments, accumulated)
            y = ops.batch_norm(x, staged.arguments, staged.accumulated)
            with ops.notifying_peers(arguments.scope, arguments.group):
                y = self.finish(y)
            staged.write_back()
            return y
        return ops.batch_norm(
            x,
            arguments,
            accumulated,
            activation=self.activation,
            negative_slope=self.negative_slope,
            residual=self.residual,
        )

    def _is_one_op(self, x: torch.Tensor) -> bool:
        residual = self.residual
        if residual is None:
            return True
        # The op then keeps y, which a later operation in place may change. torch's relu keeps it
        # too; the other activations keep their input.
        return (
            self.activation == "relu"
            and isinstance(residual, torch.Tensor)
            and not (residual.is_nested or x.is_nested)  # which have no shape
            and residual.shape == x.shape
            and residual.dtype == x.dtype
            and residual.device == x.device
        )

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Add the residual and activate."""
        if self.residual is not None:
            y = y + self.residual
        if self.activation == "relu":
            return functional.relu(y)
        if self.activation == "relu6":
            return functional.relu6(y)
        if self.activation == "leaky_relu":
            return functional.leaky_relu(y, self.negative_slope)
        if self.activation == "silu":
            return functional.silu(y)
        if self.activation == "hard_swish":
            return functional.hardswish(y)
        raise unknown_activation(self.activation)

    def with_residual(
        self, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> Activated:
        """Return the same with another residual; a number stays."""
        if not isinstance(self.residual, torch.Tensor):
            return self
        residual = change(broadcast(self.residual, x))
        return Activated(self.activation, self.negative_slope, residual)

    def check_shapes(self, x: torch.Tensor) -> None:
        """Raise an error if the residual does not broadcast."""
        if isinstance(self.residual, torch.Tensor):
            torch.broadcast_shapes(self.residual.shape, x.shape)

    def split(self, sizes: list[int]) -> list[Ending]:
        """Return the same with each part of the residual's rows."""
        if not isinstance(self.residual, torch.Tensor):
            return [self] * len(sizes)
        parts = self.residual.split(sizes)
        return [Activated(self.activation, self.negative_slope, part) for part in parts]
