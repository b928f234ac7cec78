# SPDX-License-Identifier: Apache-2.0
"""The unmasked elements of an input, as rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from normscope._binding import ops

Residual = torch.Tensor | float | None


def checked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``mask`` if it is a valid mask of ``x`` [N, C, *]: bool [N, 1, *] on x's device."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        given = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"mask: expected a tensor of torch.bool, got {given}")
    expected = [x.shape[0], 1, *x.shape[2:]]
    if [*mask.shape] != expected:
        raise ValueError(f"mask: expected shape {expected}, as x [N, 1, *], got {[*mask.shape]}")
    if mask.device != x.device:
        raise ValueError(f"mask: expected x's device, {x.device}, got {mask.device}")
    return mask


def filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return x with zeros where the mask is False, after broadcasting the two.

    Unlike the result of masked_fill, this one has the memory format of x.
    """
    return torch.where(mask, x, 0.0)


def unmasked_rows(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the rows [M, C] of x [N, C, *] where the mask is True, in the order of the samples."""
    return Rows.of(x, mask).take(x)


def broadcast(residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the residual, expanded to the shape of x."""
    try:
        return residual.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"residual: expected a shape that broadcasts to x's, {[*x.shape]}, with a mask, got "
            f"{[*residual.shape]}"
        ) from None


@dataclass
class Rows:
    """The positions where a mask is True.

    Args:
        where: Index tensors [M], one for the sample and one for each spatial dimension.
    """

    where: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, x: torch.Tensor, mask: torch.Tensor) -> Rows:
        """Find the positions, if ``mask`` is a valid mask of x."""
        try:
            return cls(checked(x, mask).squeeze(1).nonzero(as_tuple=True))
        except RuntimeError as error:
            if "vmap" not in ops.transforms():
                raise
            raise ValueError(
                "mask: expected one that torch.func.vmap does not map over, since the number of "
                "elements that count depends on the data, got one that it does; use a loop"
            ) from error

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows [M, C] of x [N, C, *]."""
        return _Take.apply(x, *self.where)  # type: ignore[no-any-return, no-untyped-call]

    def put(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the rows [M, C] among zeros, in x's shape and memory format."""
        y: torch.Tensor = _Put.apply(rows, x.shape, _dense_strides(x), *self.where)  # type: ignore[no-untyped-call]
        return y


def _dense_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of an output in x's memory format."""
    return torch.empty_like(x, device="meta").stride()


# torch's own gradient of indexing has the memory format of the index, not that of x.
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
        dx = _Put.apply(drows, ctx.shape, ctx.strides, *where)  # type: ignore[no-untyped-call]
        return dx, *(None,) * len(where)

    @staticmethod
    def jvp(ctx: Any, x_tangent: torch.Tensor, *_: None) -> Any:  # noqa: ANN401
        return _Take.apply(x_tangent, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


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
        drows = _Take.apply(dy, *where)  # type: ignore[no-untyped-call]
        return drows, None, None, *(None,) * len(where)

    @staticmethod
    def jvp(ctx: Any, rows_tangent: torch.Tensor, *_: None) -> Any:  # noqa: ANN401
        return _Put.apply(rows_tangent, ctx.shape, ctx.strides, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
