# SPDX-License-Identifier: Apache-2.0
"""A small network similar to DeepLab v3 (Chen et al. 2017)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

# Dilation of each atrous branch, on a feature map with a quarter of the image's side length.
ATROUS_RATES = (1, 3, 6)


class SegmentationNetwork(nn.Module):
    """Dilated convolutions, three atrous branches next to an image-level one, and a classifier.

    The image-level branch normalizes one value per channel and image: with one image per norm batch
    there is no variance, and batch normalization raises.

    Args:
        class_count: number of classes.
        width: channels of the first convolution; the others have up to four times as many.

    Shape:
        images [N, 3, height, width] -> logits [N, class_count, height, width]

    Example:
        >>> SegmentationNetwork(class_count=11)(torch.zeros(2, 3, 48, 48)).shape
        torch.Size([2, 11, 48, 48])
    """

    def __init__(self, class_count: int, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            _convolution(3, width, stride=2),
            _convolution(width, width),
            _convolution(width, 2 * width, stride=2),
            _convolution(2 * width, 2 * width),
            _convolution(2 * width, 4 * width, dilation=2),
            _convolution(4 * width, 4 * width, dilation=4),
        )
        self.atrous = nn.ModuleList(
            _convolution(4 * width, 2 * width, dilation=rate) for rate in ATROUS_RATES
        )
        self.image_level = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), _convolution(4 * width, 2 * width, kernel=1)
        )
        branches = len(ATROUS_RATES) + 1
        self.fuse = _convolution(branches * 2 * width, 4 * width)
        self.classifier = nn.Conv2d(4 * width, class_count, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Computes the logits of each pixel."""
        features = self.encoder(images)
        whole = self.image_level(features).expand(-1, -1, *features.shape[2:])
        fused = self.fuse(torch.cat([*(branch(features) for branch in self.atrous), whole], dim=1))
        return functional.interpolate(
            self.classifier(fused), size=images.shape[2:], mode="bilinear", align_corners=False
        )


def _convolution(
    inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, dilation: int = 1
) -> nn.Sequential:
    """Convolution that keeps the size (before its stride), batch normalization, ReLU."""
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )
