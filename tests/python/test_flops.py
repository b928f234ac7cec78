# SPDX-License-Identifier: Apache-2.0
"""fvcore and torch's counter of operations treat the layers like torch's."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import normscope
from normscope.models import fvcore_handles

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fvcore uses torch.jit
    from fvcore.nn import FlopCountAnalysis, precise_bn


def network(norm: type[nn.Module], act: type[nn.Module], *, affine: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8, affine=affine), act(), nn.Conv2d(8, 2, 3), nn.Flatten()
    )


def of_torch(*, affine: bool = True) -> nn.Module:
    return network(nn.BatchNorm2d, nn.ReLU, affine=affine)


def batch() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8)


def counted(model: nn.Module) -> tuple[Counter[str], Counter[str]]:
    """Return fvcore's counts for each operator, and the operators that it does not know."""
    analysis = FlopCountAnalysis(model, batch()).unsupported_ops_warnings(False)  # noqa: FBT003
    analysis.set_op_handle(**fvcore_handles)
    return analysis.by_operator(), analysis.unsupported_ops()


LAYERS = [(normscope.BatchNorm2d, nn.ReLU), (normscope.BatchNormAct2d, nn.Identity)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("norm", "act"), LAYERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fvcore_counts_a_layer_like_torch_s(
    norm: type[nn.Module], act: type[nn.Module], *, training: bool, affine: bool
) -> None:
    model = network(norm, act, affine=affine).train(training)

    counts, unsupported = counted(model)

    assert counts == counted(of_torch(affine=affine).train(training))[0]
    assert counts["batch_norm"] > 0
    assert not unsupported


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        model(batch()).sum().backward()
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize(("norm", "act"), LAYERS)
def test_torch_counts_a_model_like_torch_s(norm: type[nn.Module], act: type[nn.Module]) -> None:
    assert flops(network(norm, act)) == flops(of_torch()) > 0


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
