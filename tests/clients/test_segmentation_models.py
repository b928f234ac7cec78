# SPDX-License-Identifier: Apache-2.0
"""segmentation_models_pytorch: its decoders on its own encoders and on timm's."""

from __future__ import annotations

import segmentation_models_pytorch as smp
from client import Client, NetworkTests, outputs_for

CLIENTS = {
    "unet": Client(
        lambda: smp.Unet(
            "resnet18",
            encoder_weights=None,
            encoder_depth=3,
            decoder_channels=(64, 32, 16),
            decoder_attention_type="scse",
            classes=2,
        ),
        outputs_for(3, 64, 64),
    ),
    "deeplab": Client(
        lambda: smp.DeepLabV3Plus(
            "tu-mobilenetv3_small_050",  # from timm
            encoder_weights=None,
            decoder_channels=32,
            decoder_aspp_dropout=0.0,
            classes=2,
        ),
        outputs_for(3, 64, 64),
    ),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""
