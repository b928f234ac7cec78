# SPDX-License-Identifier: Apache-2.0
"""The part of the layers that torch.jit.script compiles: evaluation."""

import torch
from torch.nn import functional


def evaluated(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,  # noqa: FBT001 - TorchScript's calls are by position
    eps: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize with running statistics, or with those of ``x`` if there are none.

    Args:
        x: [N, C, *].
        running_mean: [C].
        running_var: [C].
        weight: [C].
        bias: [C].
        training: Whether the layer is in training.
        eps: Added to the variance.
        mask: [N, 1, *], True where x counts; None if all of x counts.

    Raises:
        RuntimeError: In training, which cannot be scripted; or if there is a mask and no running
            statistics.
    """
    if training:
        raise RuntimeError(
            "training: expected a scripted layer of normscope in evaluation, got one in training; "
            "call eval(), or script normscope.to_torch(model), which shares no statistics"
        )
    has_none = running_mean is None and running_var is None
    if mask is not None:
        if has_none:
            raise RuntimeError(
                "mask: expected a scripted layer that has running statistics, got one without"
            )
        x = filled(x, mask)
    return functional.batch_norm(x, running_mean, running_var, weight, bias, has_none, 0.0, eps)


def filled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return x with zeros where the mask is False, after broadcasting the two.

    Unlike the result of masked_fill, this one has the memory format of x.

    Args:
        x: The tensor to mask.
        mask: True where x counts.
    """
    return torch.where(mask, x, 0.0)


def activated(y: torch.Tensor, activation: str, negative_slope: float) -> torch.Tensor:
    """Call torch's function for an activation.

    Args:
        y: The input of the activation.
        activation: As for BatchNormAct.
        negative_slope: As for BatchNormAct.
    """
    if activation == "relu":
        return functional.relu(y)
    if activation == "relu6":
        return functional.relu6(y)
    if activation == "leaky_relu":
        return functional.leaky_relu(y, negative_slope)
    if activation == "silu":
        return functional.silu(y)
    assert activation == "hard_swish"
    return functional.hardswish(y)
