# SPDX-License-Identifier: Apache-2.0
"""Tools that fold and quantize torch's layers also work on the layers that to_torch makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deployed_networks import assert_close, batch, trained
from rank_pool import RankPool
from torch import distributed, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

import normscope

# Warnings of the tools about themselves and their dependencies; none is caused by normscope.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quant:UserWarning"),
]


class Plain(nn.Module):
    """A plain sequence of convolutions and layers, which can be fused and quantized."""

    def __init__(self, norm: Callable[[int], nn.Module], act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = norm(8)
        self.act = act()
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.act(self.norm(self.conv(x))))
        return y


# The second layer includes the activation.
PLAIN: dict[str, tuple[Callable[[int], nn.Module], Callable[[], nn.Module]]] = {
    "layer": (normscope.BatchNorm2d, nn.ReLU),
    "activated": (normscope.BatchNormAct2d, nn.Identity),
}


def plain(kind: str = "layer") -> nn.Module:
    torch.manual_seed(0)
    return trained(Plain(*PLAIN[kind]))


def of_torch() -> nn.Module:
    """Return the same network with torch's layer."""
    model = Plain(nn.BatchNorm2d, nn.ReLU)
    model.load_state_dict(plain().state_dict())
    return model.eval()


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


@pytest.mark.parametrize("kind", PLAIN)
def test_layers_are_folded_into_convolutions(kind: str) -> None:
    from torch.ao.quantization import fuse_modules

    model = plain(kind)
    expected = model(batch())
    normscope.to_torch(model)
    names = {"layer": ["norm", "act"], "activated": ["norm.0", "norm.1"]}

    fused: nn.Module = fuse_modules(model, [["conv", *names[kind]]])

    assert not layers(fused)
    assert_close(fused(batch()), expected)


def quantize(model: nn.Module) -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batch(),))
    prepared(batch())
    quantized: nn.Module = convert_fx(prepared)
    return quantized


@pytest.mark.parametrize("kind", PLAIN)
def test_a_quantized_model_matches_that_of_torch_s_layers(kind: str) -> None:
    quantized = quantize(normscope.to_torch(plain(kind)))

    assert not layers(quantized)
    assert torch.equal(quantized(batch()), quantize(of_torch())(batch()))


@pytest.mark.parametrize("kind", PLAIN)
def test_quantization_warns_about_layers_that_it_ignores(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"norm: torch.ao.*normscope.to_torch\(model\)"):
        quantize(plain(kind))


def prepare_qat(model: nn.Module) -> fx.GraphModule:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    model = normscope.to_torch(model).train()
    return prepare_qat_fx(model, get_default_qat_qconfig_mapping(), (batch(),))


def train_quantized() -> tuple[list[torch.Tensor], int, bool]:
    """Train with a scope; return running statistics, remaining layers, and whether y is close."""
    from torch.ao.quantization.quantize_fx import convert_fx

    prepared = normscope.convert(prepare_qat(plain()), "world")
    prepared(batch(distributed.get_rank())).square().sum().backward()
    [layer] = [module for module in prepared.modules() if isinstance(module, normscope.BatchNorm2d)]
    statistics = [layer.running_mean.clone(), layer.running_var.clone()]  # type: ignore[union-attr]
    expected = prepared.eval()(batch())
    quantized = convert_fx(normscope.revert(prepared))
    # Outputs and weights are quantized to 1/255 of their range: allow an error of a few steps.
    near = (quantized(batch()) - expected).abs().max() < 0.05 * expected.abs().max()
    return statistics, len(layers(quantized)), bool(near)


def test_ranks_share_statistics_in_training_for_quantization(ranks: RankPool) -> None:
    (mine, left, near), (theirs, *_) = ranks.run(2, train_quantized)

    alone = prepare_qat(plain())
    alone(batch(0))
    assert all(map(torch.equal, mine, theirs))
    [layer] = [module for module in alone.modules() if isinstance(module, nn.BatchNorm2d)]
    assert layer.running_mean is not None
    assert not torch.allclose(mine[0], layer.running_mean)
    assert (left, near) == (0, True)


def quantize_pt2e(model: nn.Module) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, (batch(),)).module(), quantizer)
    prepared(batch())
    return convert_pt2e(prepared)


def test_quantization_of_an_exported_model_matches_that_of_torch_s_layers() -> None:
    got, expected = (quantize_pt2e(m) for m in (plain(), of_torch()))

    assert torch.equal(got(batch()), expected(batch()))
