# SPDX-License-Identifier: Apache-2.0
"""Batch normalization without a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from normscope._binding import groups
from normscope._binding.ops import FAILURES, ForwardArguments
from normscope._binding.torch_private import watch_joins
from normscope.layers.ending import NOTHING
from normscope.layers.forward import (
    evaluate_masked,
    notify_peers_of_layer,
    scope_and_group_in_use,
    train,
)
from normscope.layers.scope import Scope

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from normscope.layers.batch_norm import SliceStats

__all__ = ["batch_norm"]


def batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    scope: Scope | str = "world",
    process_group: ProcessGroup | DeviceMesh | None = None,
    slice_stats: SliceStats = "pooled",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize over the norm batch of a scope, as :class:`normscope.BatchNorm` does.

    Per channel::

        y = (x - mean) / sqrt(var + eps) * weight + bias

    The arguments up to ``eps`` are those of ``torch.nn.functional.batch_norm``.

    Args:
        x: The input.
        running_mean: Updated in training if given, used in evaluation.
        running_var: As running_mean.
        weight: None for ones.
        bias: None for zeros.
        training: Whether to use the statistics of the norm batch, or the running ones.
        momentum: Weight of the new statistics in the running ones.
        eps: Added to the variance.
        scope: Who shares statistics.
        process_group: The ranks that the scope refers to, or a mesh of one dimension; None for the
            default group, if there is one.
        slice_stats: How the slices of ``slices:K`` update the running statistics.
        mask: True where x counts; elsewhere the result is 0. None if all of x counts.

    Shape:
        - x, and the result: [N, C, *]
        - running_mean, running_var, weight, bias: [C]
        - mask: bool [N, 1, *]

    Raises:
        ValueError: If scope or mask is malformed; in training also if slice_stats or eps is, or a
            norm batch has one value per channel.
        RuntimeError: If shapes or dtypes do not fit, or the ranks cannot exchange.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> batch_norm(x, None, None, training=True, eps=1e-12, scope="local")
        tensor([[-1.],
                [ 1.]])
    """
    given = groups.name_of(process_group)
    parsed = Scope(str(scope))
    if not training:
        running = running_mean, running_var
        if mask is not None:
            return evaluate_masked(x, mask, *running, weight, bias, eps, NOTHING)
        has_none = running_mean is None and running_var is None
        return torch.nn.functional.batch_norm(x, *running, weight, bias, has_none, eps=eps)
    if not parsed.is_of_one_rank and not torch.compiler.is_compiling():
        watch_joins()
    try:
        text, group_name = scope_and_group_in_use(parsed, given, x)
    except FAILURES as error:
        notify_peers_of_layer(error, x, parsed, given, "")
        raise
    arguments = ForwardArguments(
        weight,
        bias,
        running_mean,
        running_var,
        None,
        momentum,
        eps,
        (),
        slice_stats,
        text,
        group_name,
        "",
    )
    return train(None, x, mask, arguments)
