# SPDX-License-Identifier: Apache-2.0
"""What a mask leaves of an input, as rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from normscope import _library

Residual = torch.Tensor | float | None


def checked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask of ``x`` [N, C, *], if it is one: bool [N, 1, *] on the same device.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"mask: expected a tensor of torch.bool, got {given}")
    expected = [x.shape[0], 1, *x.shape[2:]]
    if [*mask.shape] != expected:
        raise ValueError(f"mask: expected shape {expected}, as x [N, 1, *], got {[*mask.shape]}")
    if mask.device != x.device:
        raise ValueError(f"mask: expected x's device, {x.device}, got {mask.device}")
    return mask


def unmasked_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows [M, C] of x [N, C, *] where the mask is True, in the order of the samples."""
    return Rows.of(x, mask).take(x)


def broadcast(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A residual, in x's shape.

    Raises:
        ValueError: If it does not broadcast to that.
    """
    try:
        return residual.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"residual: expected with a mask a shape that broadcasts to x's, {[*x.shape]}, got "
            f"{[*residual.shape]}"
        ) from None


@dataclass
class Rows:
    """Where a mask is True.

    Args:
        where: Indices [M] of the sample and of each position.
    """

    where: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, x: torch.Tensor, mask: torch.Tensor) -> Rows:
        """Find them.

        Raises:
            ValueError: If it is no mask of x.
        """
        try:
            return cls(checked(x, mask).squeeze(1).nonzero(as_tuple=True))
        except RuntimeError as error:
            if "vmap" not in _library.transforms():
                raise
            raise ValueError(
                "mask: expected one that torch.func.vmap does not map over, since how many "
                "elements count is data, got one that it does; use a loop"
            ) from error

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows [M, C] of x [N, C, *]."""
        return _take(x, self.where)

    def take_residual(self, residual: Residual, x: torch.Tensor) -> Residual:
        """The rows of what is added to x, of any shape that broadcasts; a number is one."""
        if not isinstance(residual, torch.Tensor):
            return residual
        return self.take(broadcast(residual, x))

    def put(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Zeros in x's shape and memory format, with rows [M, C] in them."""
        return _put(rows, x.shape, _dense_strides(x), self.where)


def _dense_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Those of an output in x's memory format."""
    return torch.empty_like(x, device="meta").stride()


def _take(x: torch.Tensor, where: tuple[torch.Tensor, ...]) -> torch.Tensor:
    rows: torch.Tensor = _Take.apply(x, *where)  # type: ignore[no-untyped-call]
    return rows


def _put(
    rows: torch.Tensor,
    shape: torch.Size,
    strides: tuple[int, ...],
    where: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    y: torch.Tensor = _Put.apply(rows, shape, strides, *where)  # type: ignore[no-untyped-call]
    return y


# torch's own gradient of an index lies in the memory format of the index, not of x.
class _Take(torch.autograd.Function):
    """The rows of x; the gradient of :class:`_Put`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        return x.movedim(1, -1)[where]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ANN401
        x, *where = inputs
        ctx.shape, ctx.strides = x.shape, _dense_strides(x)
        ctx.save_for_backward(*where)
        ctx.save_for_forward(*where)

    @staticmethod
    def backward(ctx: Any, drows: torch.Tensor) -> Any:  # noqa: ANN401
        where = ctx.saved_tensors
        return _put(drows, ctx.shape, ctx.strides, where), *(None,) * len(where)

    @staticmethod
    def jvp(ctx: Any, x_tangent: torch.Tensor, *_: None) -> Any:  # noqa: ANN401
        return _take(x_tangent, ctx.saved_tensors)


class _Put(torch.autograd.Function):
    """Rows among zeros; the gradient of :class:`_Take`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rows: torch.Tensor, shape: torch.Size, strides: tuple[int, ...], *where: torch.Tensor
    ) -> torch.Tensor:
        y = rows.new_empty_strided(shape, strides).zero_()
        y.movedim(1, -1).index_put_(where, rows)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ANN401
        _, ctx.shape, ctx.strides, *where = inputs
        ctx.save_for_backward(*where)
        ctx.save_for_forward(*where)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # noqa: ANN401
        where = ctx.saved_tensors
        return _take(dy, where), None, None, *(None,) * len(where)

    @staticmethod
    def jvp(ctx: Any, rows_tangent: torch.Tensor, *_: None) -> Any:  # noqa: ANN401
        return _put(rows_tangent, ctx.shape, ctx.strides, ctx.saved_tensors)
