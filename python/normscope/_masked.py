# SPDX-License-Identifier: Apache-2.0
"""Layers of which a mask says what counts: the same ops, on rows of what does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from normscope import _library
from normscope._library import Running
from normscope._moments import no_moments
from normscope._rows import Residual, Rows, broadcast, checked
from normscope._scripted import filled

Op = Callable[..., torch.Tensor]
# Chooses the op for an input and what is added to its output.
ChooseOp = Callable[[torch.Tensor, Residual], Op]


def normalize_filled(
    x: torch.Tensor, mask: torch.Tensor, residual: Residual, normalize: Op
) -> torch.Tensor:
    """Call ``normalize(x, residual)``, which works element by element, where the mask is True.

    What is masked is 0 before and after, for its own value would be in the gradients: 0 * NaN.
    """
    checked(x, mask)
    if isinstance(residual, torch.Tensor):
        residual = filled(broadcast(residual, x), mask)
    return filled(normalize(filled(x, mask), residual), mask)


def normalize_rows(
    x: torch.Tensor, mask: torch.Tensor, residual: Residual, normalize: Op
) -> torch.Tensor:
    """Call ``normalize(x, residual)`` on the rows [M, C] where the mask is True, 0 elsewhere."""
    rows = Rows.of(x, mask)
    return rows.put(normalize(rows.take(x), rows.take_residual(residual, x)), x)


def normalize_alone(
    x: torch.Tensor, mask: torch.Tensor, residual: Residual, layer: _BatchNorm, finish: Op
) -> torch.Tensor:
    """Evaluate a layer without running statistics; ``finish(y, residual)`` follows."""

    def normalize(rows: torch.Tensor, residual: Residual) -> torch.Tensor:
        y = torch.nn.functional.batch_norm(
            rows, None, None, layer.weight, layer.bias, training=True, eps=layer.eps
        )
        return finish(y, residual)

    return normalize_rows(x, mask, residual, normalize)


class MaskedOp:
    """An op of training, on what a mask leaves of its input; called as the op.

    Args:
        mask: [N, 1, *], True where x counts.
        choose: The op for an input, or a part of it, and what is added to its output.
        finish: What follows on the output of a layer without an activation, and on that residual.
        residual: What is added; None for nothing.

    Attributes:
        mask: As given.
        elements: That counted in the last call.
    """

    def __init__(
        self, mask: torch.Tensor, choose: ChooseOp, finish: Op, residual: Residual = None
    ) -> None:
        self.mask = mask
        self._choose = choose
        self._finish = finish
        self._residual = residual
        self.elements = 0

    # How many rows there are is in no graph: its sizes are known when it is compiled.
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
            # The op says what is wrong with it.
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
        """Do what follows on the output of a layer that was normalized elsewhere."""
        residual = self._residual
        if isinstance(residual, torch.Tensor):
            residual = filled(broadcast(residual, y), self.mask)
        return filled(self._finish(y, residual), self.mask)


@dataclass
class _Slices:
    """The rows of each slice, which may be any number, as norm batches of their own.

    Args:
        rows: [M, C] of all slices.
        sizes: How many rows each of them has.
        residuals: Of each slice.
        choose: The op for a slice.
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
        """Normalize each slice, and update the running statistics once all have been."""
        where = {"scope": "local", "slice_stats": slice_stats, "group": group, "layer": layer}
        none: Running = (None, None, None)
        # Of copies: what raises for the last slice updates nothing.
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
    """Whether a backward is running, as in checkpointing: it updates no running statistics."""
    return torch._C._current_graph_task_id() >= 0


def _sizes_of_slices(mask: torch.Tensor, count: int) -> list[int]:
    """How many rows each of torch.chunk's slices has."""
    slices = mask.chunk(max(1, min(count, len(mask))))
    sizes: list[int] = torch.stack([part.count_nonzero() for part in slices]).tolist()
    return sizes


def _split(residual: Residual, sizes: list[int]) -> list[Residual]:
    if isinstance(residual, torch.Tensor):
        return list(residual.split(sizes))
    return [residual] * len(sizes)
