# SPDX-License-Identifier: Apache-2.0
"""Small segmentation networks: pyramids of poolings and of features, an encoder and decoder."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


def _convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class DilatedBlock(nn.Module):
    """Two dilated convolutions and a shortcut (He et al. 2016, Yu and Koltun 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, dilation, dilation, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block; the size is divided by the stride."""
        return functional.relu(self.residual(x) + self.shortcut(x))


class PyramidNetwork(nn.Module):
    """A small PSPNet (Zhao et al. 2017): stride 4, and poolings to 1, 2, 3 and 6 positions."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            _convolution(3, width, stride=2),
            DilatedBlock(width, width),
            DilatedBlock(width, 2 * width, stride=2),
            DilatedBlock(2 * width, 4 * width, dilation=2),
            DilatedBlock(4 * width, 4 * width, dilation=4),
        )
        self.pyramid = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(bins), *_convolution(4 * width, width, 1))
            for bins in (1, 2, 3, 6)
        )
        self.fuse = _convolution(8 * width, 4 * width)
        self.classifier = nn.Conv2d(4 * width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the logits of each pixel."""
        features = self.encoder(images)
        pooled = (_resized(branch(features), features) for branch in self.pyramid)
        fused = self.fuse(torch.cat([features, *pooled], 1))
        return _resized(self.classifier(fused), images)


class UNet(nn.Module):
    """A small U-Net (Ronneberger et al. 2015): three poolings, channels doubled by each."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        channels = [width * 2**i for i in range(4)]
        self.down = nn.ModuleList(
            nn.Sequential(_convolution(inputs, outputs), _convolution(outputs, outputs))
            for inputs, outputs in pairwise([3, *channels])
        )
        self.up = nn.ModuleList(
            nn.Sequential(_convolution(coarse + fine, fine), _convolution(fine, fine))
            for coarse, fine in pairwise(channels[::-1])
        )
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the logits of each pixel."""
        x, skipped = images, []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            skipped.append(x)
        x = skipped.pop()
        for block in self.up:
            fine = skipped.pop()
            x = block(torch.cat([functional.interpolate(x, size=fine.shape[2:]), fine], 1))
        logits: torch.Tensor = self.classifier(x)
        return logits


class FeaturePyramid(nn.Module):
    """A small feature pyramid (Lin et al. 2017): features of four resolutions, added up."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        channels = [width * 2**i for i in range(4)]
        self.stem = _convolution(3, width)
        self.stages = nn.ModuleList(
            DilatedBlock(inputs, outputs, stride=2)
            for inputs, outputs in pairwise([width, *channels])
        )
        self.lateral = nn.ModuleList(_convolution(each, 2 * width, 1) for each in channels)
        self.smooth = _convolution(2 * width, 2 * width)
        self.classifier = nn.Conv2d(2 * width, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the logits of each pixel."""
        x, features = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        merged = self.lateral[-1](features[-1])
        for lateral, fine in zip(self.lateral[-2::-1], features[-2::-1], strict=True):
            merged = lateral(fine) + _resized(merged, fine)
        return _resized(self.classifier(self.smooth(merged)), images)


def _resized(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return functional.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)
