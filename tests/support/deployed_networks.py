# SPDX-License-Identifier: Apache-2.0
"""Networks to deploy, with layers of normscope that were put into the model in different ways."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import normscope

# Sums of at most 72 products of order ten, in a different order: a few dozen roundings in float32.
ABSOLUTE = 72 * 10 * 6e-8


class Network(nn.Module):
    """One layer of each kind: BatchNorm2d, SyncBatchNorm, and one with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.norm1 = normscope.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = normscope.SyncBatchNorm(8)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm3 = normscope.BatchNormAct2d(8, activation="relu6", scope="local")
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        z = self.relu(self.norm2(self.conv2(y)))
        out: torch.Tensor = self.norm3(self.conv3(z), residual=y)
        return out


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


# Keyed by how the layer is put into the model; the last one includes the activation.
PLAIN: dict[str, tuple[Callable[[int], nn.Module], Callable[[], nn.Module]]] = {
    "class": (normscope.BatchNorm2d, nn.ReLU),
    "synchronized": (normscope.SyncBatchNorm, nn.ReLU),
    "converted": (lambda c: normscope.convert(nn.BatchNorm2d(c)), nn.ReLU),
    "activated": (normscope.BatchNormAct2d, nn.Identity),
}


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module) -> nn.Module:
    """Give the model non-initial parameters and running statistics; return it in evaluation."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5, generator)
            nn.init.normal_(module.bias, generator=generator)
    for seed in range(3):
        model(batch(seed))
    return model.eval()


def network() -> nn.Module:
    torch.manual_seed(0)
    return trained(Network())


def plain(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return trained(Plain(*PLAIN[kind]))


def of_torch() -> nn.Module:
    """Return the same network with torch's layer."""
    model = Plain(nn.BatchNorm2d, nn.ReLU)
    model.load_state_dict(plain("class").state_dict())
    return model.eval()


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)
