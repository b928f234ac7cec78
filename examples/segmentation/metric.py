# SPDX-License-Identifier: Apache-2.0
"""Intersection over union, the measure of a segmentation."""

from __future__ import annotations

import torch

from scenes import VOID


def confusion(predictions: torch.Tensor, masks: torch.Tensor, class_count: int) -> torch.Tensor:
    """Counts pixels by true and by predicted class; void pixels do not count.

    Shape:
        predictions, masks [...] -> [class_count (true), class_count (predicted)]

    Example:
        >>> confusion(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
        tensor([[1, 1],
                [0, 1]])
    """
    known = masks != VOID
    pairs = masks[known] * class_count + predictions[known]
    return torch.bincount(pairs, minlength=class_count**2).view(class_count, class_count)


def mean_iou(counts: torch.Tensor) -> float:
    """Mean over the classes of intersection / union.

    A class that is neither there nor predicted says nothing, and is left out.

    Example:
        >>> mean_iou(torch.tensor([[1, 1], [0, 1]]))
        0.5
    """
    intersection = counts.diagonal().double()
    union = counts.sum(0) + counts.sum(1) - intersection
    seen = union > 0
    return float((intersection[seen] / union[seen]).mean())
