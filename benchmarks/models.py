# SPDX-License-Identifier: Apache-2.0
"""Networks for benchmarks, as in their papers, with torch.nn's layers and random weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def _conv(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution that keeps the size, apart from its stride, and its normalization."""
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al. 2016), with the stride in its 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int, dilation: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            *_conv(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_conv(width, width, 3, stride=stride, dilation=dilation),
            nn.ReLU(inplace=True),
            *_conv(width, outputs, 1),
        )
        self.shortcut = nn.Sequential(
            *(_conv(inputs, outputs, 1, stride=stride) if stride > 1 or inputs != outputs else [])
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, inputs, H, W] to [N, 4 width, H / stride, W / stride]."""
        return functional.relu(self.path(x) + self.shortcut(x))


def _resnet_50_features(strides: tuple[int, ...], dilations: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = [
        *_conv(3, 64, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = strides[stage] if block == 0 else 1
            layers.append(Bottleneck(inputs, width, stride, dilations[stage]))
            inputs = 4 * width
    return nn.Sequential(*layers)


def resnet_50(classes: int = 1000) -> nn.Module:
    """He et al. 2016: images [N, 3, H, W] to logits [N, classes]."""
    return nn.Sequential(
        _resnet_50_features(strides=(1, 2, 2, 2), dilations=(1, 1, 1, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2048, classes),
    )


class AtrousPyramid(nn.Module):
    """The head of DeepLabv3: parallel dilated convolutions, and the mean of the image."""

    def __init__(self, inputs: int, width: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        branches = [_conv(inputs, width, 1)]
        branches += [_conv(inputs, width, 3, dilation=dilation) for dilation in dilations]
        self.branches = nn.ModuleList(
            nn.Sequential(*branch, nn.ReLU(inplace=True)) for branch in branches
        )
        self.image = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), *_conv(inputs, width, 1), nn.ReLU(inplace=True)
        )
        self.fuse = nn.Sequential(
            *_conv((len(branches) + 1) * width, width, 1), nn.ReLU(inplace=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, inputs, H, W] to [N, width, H, W]."""
        of_image = self.image(x).expand(-1, -1, x.shape[2], x.shape[3])
        y: torch.Tensor = self.fuse(torch.cat([*(b(x) for b in self.branches), of_image], 1))
        return y


def deeplab(classes: int = 21) -> nn.Module:
    """Chen et al. 2017, on a ResNet-50 of output stride 16: logits [N, classes, H / 16, W / 16]."""
    return nn.Sequential(
        _resnet_50_features(strides=(1, 2, 2, 1), dilations=(1, 1, 1, 2)),
        AtrousPyramid(2048, 256, (6, 12, 18)),
        nn.Conv2d(256, classes, 1),
    )


class InvertedResidual(nn.Module):
    """The block of MobileNetV2: wide inside, with a depthwise convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.path = nn.Sequential(
            *_conv(inputs, width, 1),
            nn.ReLU6(inplace=True),
            *_conv(width, width, 3, stride=stride, groups=width),
            nn.ReLU6(inplace=True),
            *_conv(width, outputs, 1),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, inputs, H, W] to [N, outputs, H / stride, W / stride]."""
        y: torch.Tensor = self.path(x)
        return x + y if self.adds else y


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """Sandler et al. 2018: images [N, 3, H, W] to logits [N, classes]."""
    layers: list[nn.Module] = [*_conv(3, 32, 3, stride=2), nn.ReLU6(inplace=True)]
    inputs = 32
    for expansion, outputs, blocks, first_stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(blocks):
            stride = first_stride if block == 0 else 1
            layers.append(InvertedResidual(inputs, outputs, stride, expansion))
            inputs = outputs
    layers += [*_conv(inputs, 1280, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1280, classes))


class UNet3d(nn.Module):
    """Cicek et al. 2016, of two levels: [N, 1, D, H, W] to logits [N, classes, D, H, W]."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._level(1, 16), self._level(16, 32)])
        self.middle = self._level(32, 64)
        self.up = nn.ModuleList([self._level(64 + 32, 32), self._level(32 + 16, 16)])
        self.head = nn.Conv3d(16, classes, 1)

    @staticmethod
    def _level(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for width in (inputs, outputs):
            conv = nn.Conv3d(width, outputs, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, 1, D, H, W] to [N, classes, D, H, W]; sizes are multiples of 4."""
        skipped = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
            x = functional.max_pool3d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = level(torch.cat([x, skipped.pop()], 1))
        y: torch.Tensor = self.head(x)
        return y
