# SPDX-License-Identifier: Apache-2.0
"""Autocast changes no layer, whatever the input's dtype, by all kernels."""

from __future__ import annotations

import pytest
import torch
from oracle import results_of
from rank_pool import KERNELS, RankPool

import normscope

CASTS = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *CASTS)


class UnderAutocast(torch.nn.Module):
    """A layer whose forward runs under autocast."""

    def __init__(self, scope: str, dtype: torch.dtype, cast: torch.dtype | None) -> None:
        super().__init__()
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        self.layer = normscope.BatchNorm1d(3, scope=scope, dtype=kept)
        self.cast = cast

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        with torch.autocast("cpu", self.cast, enabled=self.cast is not None):
            y: torch.Tensor = self.layer(x, mask=mask)
        return y


def differences(scope: str, masked: bool, compiled: bool) -> list[str]:  # noqa: FBT001
    """Return the results of a layer that differ from those without autocast."""
    mask = torch.arange(4).expand(6, 1, 4) < 3 if masked else None
    found = []
    for dtype in (torch.float32, torch.bfloat16) if compiled else DTYPES:
        x = (torch.randn(6, 3, 4) + 3).to(dtype)
        steps = {}
        for cast in (None, *CASTS):
            layer = UnderAutocast(scope, dtype, cast)
            if compiled:
                layer.compile(backend="aot_eager")
            steps[cast] = results_of(layer, x, mask=mask)
        if compiled:
            torch.compiler.reset()
        for cast in CASTS:
            found += [
                f"{name} of {dtype} under {cast}"
                for name, value in steps[cast].items()
                if not torch.equal(value, steps[None][name])
            ]
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("scope", "masked", "compiled"),
    [
        ("world", False, False),
        ("world", True, False),
        ("slices:2", False, False),
        ("slices:2", True, False),
        ("slices:2", False, True),
    ],
)
def test_autocast_changes_nothing(
    pools: dict[str, RankPool], kernels: str, scope: str, *, masked: bool, compiled: bool
) -> None:
    ranks = 2 if scope == "world" else 1
    assert pools[kernels].run(ranks, differences, scope, masked, compiled) == [[]] * ranks
