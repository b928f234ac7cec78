# SPDX-License-Identifier: Apache-2.0
"""torchvision's models: classification, segmentation, detection, and feature extraction."""

from __future__ import annotations

from typing import Any

import client
import torch
from client import Client, NetworkTests, outputs_for, samples, seeded
from torch import nn
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor

import normscope


def deeplab() -> nn.Module:
    model = models.segmentation.deeplabv3_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=5
    )
    model.classifier[0].project[3].p = 0.0  # dropout
    assert isinstance(model, nn.Module)
    return model


CLIENTS = {
    "resnet18": Client(models.resnet18, outputs_for(3, 64, 64)),
    "mobilenet_v3_small": Client(
        lambda: models.mobilenet_v3_small(dropout=0.0), outputs_for(3, 64, 64)
    ),
    "deeplabv3": Client(deeplab, outputs_for(3, 32, 32, key="out")),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""


def detector() -> nn.Module:
    model = models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    )
    assert isinstance(model, nn.Module)
    return model


def losses(model: nn.Module, part: slice) -> torch.Tensor:
    boxes = torch.tensor([[20.0, 30.0, 200.0, 260.0], [100.0, 40.0, 300.0, 90.0]]).double()
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(client.SAMPLES)]
    found: dict[str, torch.Tensor] = model(list(samples(3, 96, 96)[part]), targets[part])
    return torch.stack(list(found.values())).view(1, -1)


def test_a_detector_trains_as_with_torch_s_layers() -> None:
    plain, model = seeded(detector), normscope.convert(seeded(detector), "local")

    expected = client.step_of(plain, losses)

    client.assert_equal_steps(client.step_of(model, losses), expected)


def test_features_can_be_extracted_from_a_converted_model() -> None:
    plain: Any = seeded(models.resnet18)
    model = normscope.convert(seeded(models.resnet18), "local")
    nodes = {"layer1.0.bn1": "norm", "layer2": "block"}
    x = samples(3, 64, 64)

    found = create_feature_extractor(model, nodes)(x)

    expected = create_feature_extractor(plain, nodes)(x)
    assert found.keys() == expected.keys() == {"norm", "block"}
    for name, feature in found.items():
        torch.testing.assert_close(feature, expected[name], rtol=0, atol=client.TOLERANCE)
