# SPDX-License-Identifier: Apache-2.0
"""transformers: models with batch normalization, built from a config."""

from __future__ import annotations

from client import Client, NetworkTests, samples, seeded
from torch import Tensor, nn
from transformers import (
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)


def classified(model: nn.Module, part: slice) -> Tensor:
    y: Tensor = model(pixel_values=samples(3, 32, 32)[part]).logits
    return y


def resnet() -> nn.Module:
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
        num_labels=3,
    )
    model: nn.Module = ResNetForImageClassification(config)
    return model


def mobilenet() -> nn.Module:
    config = MobileNetV2Config(
        image_size=32, depth_multiplier=0.35, num_labels=3, classifier_dropout_prob=0.0
    )
    model: nn.Module = MobileNetV2ForImageClassification(config)
    return model


CLIENTS = {
    "resnet": Client(lambda: seeded(resnet), classified),
    "mobilenet": Client(lambda: seeded(mobilenet), classified),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""
