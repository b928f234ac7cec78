# SPDX-License-Identifier: Apache-2.0
"""A training forward with a mask: the same ops, applied to the rows that the mask selects.

A module of its own, which is imported when it is needed: torch.compiler.disable imports the
compiler (see constant_in_graphs in torch_private.py).
"""

from __future__ import annotations

import torch

from normscope._binding import ops
from normscope._binding.ops import ForwardArguments
from normscope.layers.ending import Ending
from normscope.layers.masks import Rows


# A graph needs its sizes when it is compiled, and the number of rows depends on the data.
@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a mask in training: how many elements count is data; compile without fullgraph"
)
def train(
    x: torch.Tensor,
    mask: torch.Tensor,
    arguments: ForwardArguments,
    ending: Ending,
    accumulated: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize with the statistics of the norm batch.

    Returns:
        y, and the rows that running statistics get.
    """
    dims = arguments.dims
    if x.dim() < 2 or (dims and x.dim() not in dims):
        return ops.batch_norm(x, arguments), x  # raises the error
    with ops.notifying_peers(arguments.scope, arguments.group):
        rows = Rows.of(x, mask)
        ending = ending.with_residual(x, rows.take)
        taken = rows.take(x)
        staged = ops.Staged(arguments._replace(dims=()), accumulated)
    tracked = taken
    slices = arguments.slices()
    if slices is not None:
        sizes = _sizes_of_slices(mask, slices)
        y = _train_slices(taken, sizes, staged.arguments, ending, staged.accumulated)
        if arguments.slice_stats == "first":
            tracked = taken[: sizes[0]]
    else:
        y = ending.train(taken, staged.arguments, staged.accumulated)
    with ops.notifying_peers(arguments.scope, arguments.group):
        y = rows.put(y, x)
    staged.write_back()
    return y, tracked


def _train_slices(
    rows: torch.Tensor,
    sizes: list[int],
    arguments: ForwardArguments,
    ending: Ending,
    accumulated: torch.Tensor | None,
) -> torch.Tensor:
    """Normalize each slice, a norm batch with any number of rows; then update the statistics."""
    updating = arguments._replace(scope="local")
    neutral = updating.without_running()
    sums = ops.no_moments(rows.shape[1], rows.device)
    pools = arguments.slice_stats == "pooled" or accumulated is not None
    counted = 1 if arguments.slice_stats == "first" else len(sizes)
    outputs = []
    for number, (part, end) in enumerate(zip(rows.split(sizes), ending.split(sizes), strict=True)):
        if number >= counted:
            y = end.train(part, neutral)
        elif pools:
            y = end.train(part, neutral, sums)
        else:
            y = end.train(part, updating)
        outputs.append(y)
    if accumulated is not None:
        accumulated += sums
    elif pools:
        ops.batch_norm_finalize(sums, *arguments[2:7], rows.dtype)
    with torch.autocast(rows.device.type, enabled=False):  # which does not know every dtype
        return torch.cat(outputs)


def _sizes_of_slices(mask: torch.Tensor, count: int) -> list[int]:
    """Return the number of rows of each slice, as torch.chunk cuts them."""
    slices = mask.chunk(max(1, min(count, len(mask))))
    sizes: list[int] = torch.stack([part.count_nonzero() for part in slices]).tolist()
    return sizes
