# SPDX-License-Identifier: Apache-2.0
"""segmentation_models_pytorch: its decoders on its own encoders and on timm's."""

from __future__ import annotations

import segmentation_models_pytorch as smp
from client import Client, NetworkTests, samples, seeded
from torch import Tensor, nn


def segmented(model: nn.Module, part: slice) -> Tensor:
    y: Tensor = model(samples(3, 64, 64)[part])
    return y


def unet() -> nn.Module:
    model: nn.Module = smp.Unet(
        "resnet18",
        encoder_weights=None,
        encoder_depth=3,
        decoder_channels=(64, 32, 16),
        decoder_attention_type="scse",
        classes=2,
    )
    return model


def deeplab() -> nn.Module:
    model: nn.Module = smp.DeepLabV3Plus(
        "tu-mobilenetv3_small_050",  # from timm
        encoder_weights=None,
        decoder_channels=32,
        decoder_aspp_dropout=0.0,
        classes=2,
    )
    return model


CLIENTS = {
    "unet": Client(lambda: seeded(unet), segmented),
    "deeplab": Client(lambda: seeded(deeplab), segmented),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""
