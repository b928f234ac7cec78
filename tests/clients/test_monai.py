# SPDX-License-Identifier: Apache-2.0
"""MONAI's networks for volumes and images."""

from __future__ import annotations

import copy

import torch
from client import Client, NetworkTests, outputs_for, samples
from monai.data import MetaTensor
from monai.networks.nets import DenseNet, SegResNet, UNet
from torch import nn

import normscope

of_volumes = outputs_for(1, 16, 16, 16)


def unet(norm: str) -> nn.Module:
    network: nn.Module = UNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 16),
        strides=(2, 2),
        num_res_units=1,
        norm=norm,
    )
    return network


CLIENTS = {
    "unet": Client(lambda: unet("batch"), of_volumes),
    "synchronized": Client(lambda: unet("syncbatch"), of_volumes),
    "segresnet": Client(
        lambda: SegResNet(
            spatial_dims=3,
            init_filters=4,
            out_channels=2,
            norm="batch",
            blocks_down=(1, 1),
            blocks_up=(1,),
        ),
        of_volumes,
    ),
    "densenet": Client(
        lambda: DenseNet(
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            init_features=8,
            growth_rate=4,
            block_config=(2, 2),
        ),
        outputs_for(1, 32, 32),
    ),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""


def test_a_tensor_with_metadata_trains_and_keeps_it() -> None:
    net = CLIENTS["densenet"].network()
    models = [normscope.convert(copy.deepcopy(net), "slices:2", fuse=True) for _ in range(2)]
    x = samples(1, 32, 32)

    y = models[0](MetaTensor(x, meta={"file": "a.nii"}))
    expected = models[1](x)
    y.sum().backward()
    expected.sum().backward()

    assert isinstance(y, MetaTensor)
    assert y.meta["file"] == "a.nii"
    assert torch.equal(y.as_tensor(), expected)
    for got, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(torch.as_tensor(got.grad), torch.as_tensor(wanted.grad))
    assert all(map(torch.equal, models[0].buffers(), models[1].buffers()))
