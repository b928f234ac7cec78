# SPDX-License-Identifier: Apache-2.0
"""Layers with a mask: the same ops, applied to the rows that the mask selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from normscope import _library
from normscope._library import Running
from normscope._moments import no_moments
from normscope._rows import Residual, Rows, broadcast, checked

Op = Callable[..., torch.Tensor]
# Chooses the op for an input and its residual.
ChooseOp = Callable[[torch.Tensor, Residual], Op]


def filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return x with zeros where the mask is False, after broadcasting the two.

    Unlike the result of masked_fill, this one has the memory format of x.
    """
    return torch.where(mask, x, 0.0)


def normalize_filled(
    x: torch.Tensor, mask: torch.Tensor, residual: Residual, normalize: Op
) -> torch.Tensor:
    """Call the elementwise ``normalize(x, residual)`` with zeros in the masked positions.

    They are set to 0 before and after the call. If only y were set to 0, a NaN in the input would
    reach the gradients, because 0 * NaN is NaN.
    """
    checked(x, mask)
    if isinstance(residual, torch.Tensor):
        residual = filled(broadcast(residual, x), mask)
    return filled(normalize(filled(x, mask), residual), mask)


def normalize_rows(
    x: torch.Tensor, mask: torch.Tensor, residual: Residual, normalize: Op
) -> torch.Tensor:
    """Call ``normalize(x, residual)`` on the rows [M, C] that the mask selects; 0 elsewhere."""
    rows = Rows.of(x, mask)
    return rows.put(normalize(rows.take(x), rows.take_residual(residual, x)), x)


def normalize_alone(
    x: torch.Tensor, mask: torch.Tensor, residual: Residual, layer: _BatchNorm, finish: Op
) -> torch.Tensor:
    """Evaluate a layer without running statistics, then call ``finish(y, residual)``."""

    def normalize(rows: torch.Tensor, residual: Residual) -> torch.Tensor:
        y = torch.nn.functional.batch_norm(
            rows, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
        )
        return finish(y, residual)

    return normalize_rows(x, mask, residual, normalize)


class MaskedOp:
    """A training op that is applied to the unmasked rows of its input; it is called like the op.

    Args:
        mask: [N, 1, *], True where x counts.
        choose: Returns the op for an input, or a part of it, and its residual.
        finish: Adds the residual to the output of a layer and applies the activation.
        residual: Added to the output; None for nothing.

    Attributes:
        mask: The given mask.
        elements: The number of elements that counted in the last call.
    """

    def __init__(
        self, mask: torch.Tensor, choose: ChooseOp, finish: Op, residual: Residual = None
    ) -> None:
        self.mask = mask
        self._choose = choose
        self._finish = finish
        self._residual = residual
        self.elements = 0

    # A graph needs its sizes when it is compiled, and the number of rows depends on the data.
    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="a mask in training: how many elements count is data; compile without fullgraph"
    )
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        num_batches_tracked: torch.Tensor | None,
        momentum: float | None,
        eps: float,
        dims: tuple[int, ...],
        *,
        scope: str,
        slice_stats: str,
        group: str,
        layer: str,
        accumulated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize; the arguments are those of :func:`normscope._library.batch_norm`."""
        parameters = (weight, bias)
        running = (running_mean, running_var, num_batches_tracked)
        where = {"slice_stats": slice_stats, "group": group, "layer": layer}
        if not isinstance(x, torch.Tensor) or x.dim() < 2 or (dims and x.dim() not in dims):
            # The op raises the error.
            return self._choose(x, None)(
                x, *parameters, *running, momentum, eps, dims, scope=scope, **where
            )
        try:
            rows = Rows.of(x, self.mask)
            residual = rows.take_residual(self._residual, x)
        except (ValueError, RuntimeError) as error:
            _library.tell_peers(error, scope, group)
            raise
        taken = rows.take(x)
        if scope.startswith("slices:"):
            sizes = _sizes_of_slices(self.mask, int(scope.removeprefix("slices:")))
            slices = _Slices(taken, sizes, _split(residual, sizes), self._choose)
            y = slices.normalize(parameters, running, momentum, eps, accumulated, **where)
        else:
            op = self._choose(taken, residual)
            moments = {} if accumulated is None else {"accumulated": accumulated}
            y = op(taken, *parameters, *running, momentum, eps, (), scope=scope, **where, **moments)
        self.elements = taken.numel()
        return rows.put(y, x)

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """Add the residual and activate, if the layer was normalized elsewhere."""
        residual = self._residual
        if isinstance(residual, torch.Tensor):
            residual = filled(broadcast(residual, y), self.mask)
        return filled(self._finish(y, residual), self.mask)


@dataclass
class _Slices:
    """The rows of all slices, each slice a norm batch of its own with any number of rows.

    Args:
        rows: The rows [M, C] of all slices.
        sizes: The number of rows of each slice.
        residuals: The residual of each slice.
        choose: Returns the op for a slice.
    """

    rows: torch.Tensor
    sizes: list[int]
    residuals: list[Residual]
    choose: ChooseOp

    def normalize(
        self,
        parameters: tuple[torch.Tensor | None, ...],
        running: Running,
        momentum: float | None,
        eps: float,
        accumulated: torch.Tensor | None,
        *,
        slice_stats: str,
        group: str,
        layer: str,
    ) -> torch.Tensor:
        """Normalize each slice, then update the running statistics."""
        where = {"scope": "local", "slice_stats": slice_stats, "group": group, "layer": layer}
        none: Running = (None, None, None)
        # Copies: if the last slice raises, nothing must have been updated.
        updated: Running = (_copy(running[0]), _copy(running[1]), _copy(running[2]))
        sums = no_moments(self.rows.shape[1], self.rows.device)
        pools = slice_stats == "pooled" or accumulated is not None
        counted = 1 if slice_stats == "first" else len(self.sizes)
        outputs = []
        for number, part in enumerate(self.rows.split(self.sizes)):
            buffers, moments = none, {}
            if number < counted and pools:
                moments = {"accumulated": sums}
            elif number < counted:
                buffers = updated
            op = self.choose(part, self.residuals[number])
            y = op(part, *parameters, *buffers, momentum, eps, (), **where, **moments)
            outputs.append(y)
        if recomputes():
            return torch.cat(outputs)
        if accumulated is not None:
            accumulated += sums
        elif pools:
            _library.batch_norm_finalize(sums, *updated, momentum, eps, self.rows.dtype)
        for buffer, value in zip(running, updated, strict=True):
            if buffer is not None and value is not None:
                buffer.detach().copy_(value)
        return torch.cat(outputs)


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.clone()


def recomputes() -> bool:
    """Return whether a backward is running, as in checkpointing; it updates no statistics."""
    return torch._C._current_graph_task_id() >= 0


def _sizes_of_slices(mask: torch.Tensor, count: int) -> list[int]:
    """Return the number of rows of each slice, as torch.chunk cuts them."""
    slices = mask.chunk(max(1, min(count, len(mask))))
    sizes: list[int] = torch.stack([part.count_nonzero() for part in slices]).tolist()
    return sizes


def _split(residual: Residual, sizes: list[int]) -> list[Residual]:
    if isinstance(residual, torch.Tensor):
        return list(residual.split(sizes))
    return [residual] * len(sizes)
