# SPDX-License-Identifier: Apache-2.0
"""Tools that look for torch's classes find the layers of normscope."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from data_parallel import data_parallel
from rank_pool import RankPool
from torch import distributed, nn

import normscope

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fvcore uses torch.jit
    from fvcore.nn import precise_bn


def test_a_synchronized_layer_is_one_of_torch() -> None:
    layer = normscope.SyncBatchNorm(3)

    assert isinstance(layer, nn.SyncBatchNorm)
    assert type(normscope.convert(nn.SyncBatchNorm(3))) is normscope.SyncBatchNorm
    assert vars(layer).keys() == vars(normscope.BatchNorm(3)).keys()


@pytest.mark.parametrize("tracks", [False, True])
def test_a_synchronized_layer_evaluates_as_torch_does(*, tracks: bool) -> None:
    x = torch.randn(4, 3, 5)
    layers = [
        c(3, track_running_stats=tracks).eval() for c in (normscope.SyncBatchNorm, nn.SyncBatchNorm)
    ]

    assert torch.equal(layers[0](x), layers[1](x))


def train_in_data_parallel(kind: str) -> tuple[torch.Tensor, str]:
    torch.manual_seed(0)
    layer = nn.SyncBatchNorm(4) if kind == "converted" else normscope.SyncBatchNorm(4)
    model = normscope.convert(nn.Sequential(nn.Linear(3, 4), layer), "world")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(distributed.get_rank()))
    data_parallel(model, sends_buffers=False)(x).square().sum().backward()
    others = nn.Sequential(nn.Linear(3, 4), layer, nn.SyncBatchNorm(4))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU") as error:
        data_parallel(others, sends_buffers=False)
    mean = layer.running_mean
    assert isinstance(mean, torch.Tensor)
    return mean, str(error.value)


@pytest.mark.parametrize("kind", ["converted", "made by hand"])
def test_data_parallel_takes_synchronized_layers_on_cpus_but_not_torch_s(
    ranks: RankPool, kind: str
) -> None:
    (mean, _), (other, _) = ranks.run(2, train_in_data_parallel, kind)

    assert torch.equal(mean, other)


def test_precise_statistics_are_those_of_torch_s_layers() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    plain.append(nn.SyncBatchNorm(4)).double()
    model = normscope.convert(copy.deepcopy(plain), "local")
    batches = list(torch.randn(3, 5, 3, 8, 8, dtype=torch.float64))

    for each in (plain, model):
        assert len(precise_bn.get_bn_modules(each)) == 2
        precise_bn.update_bn_stats(each, batches, len(batches))

    for got, expected in zip(model.buffers(), plain.buffers(), strict=True):
        # A few dozen roundings of 2e-16 of values of order one, in two layers.
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
