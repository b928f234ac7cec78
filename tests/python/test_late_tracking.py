# SPDX-License-Identifier: Apache-2.0
"""Recomputations that update nothing; test_programs.py has those of forwards without tracking."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from programs_of_ranks import track_with_gradients_only
from refusals import unchanged
from torch import nn
from torch.utils.checkpoint import checkpoint

import normscope

pytestmark = pytest.mark.on_device


def test_checkpoints_of_pytorch_pfn_extras_do_not_halve_the_momentum() -> None:
    # They do if a layer lacks this attribute: its two updates are then like one.
    assert hasattr(normscope.convert(nn.BatchNorm1d(3)), "_bn_momentum_patched")


def run_untracked(layer: nn.Module) -> None:
    """Run the layer without gradients and statistics, outside of a checkpoint."""
    layer.track_running_stats = False  # type: ignore[assignment]
    with torch.no_grad():
        layer(torch.randn(4, 3))
    layer.track_running_stats = True  # type: ignore[assignment]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("after", ["the block", "another node"])
def test_a_recomputation_of_a_forward_that_was_tracked_updates_nothing(
    after: str, *, reentrant: bool
) -> None:
    layer: Any = normscope.BatchNorm1d(3, scope="local")
    x = torch.randn(4, 3, requires_grad=True)
    y = checkpoint(nn.Sequential(layer, nn.ReLU()), x, use_reentrant=reentrant)
    if after == "another node":
        y = y * 2

    run_untracked(layer)
    with unchanged(layer):
        y.sum().backward()

    assert layer.num_batches_tracked == 1


# Each thread numbers the nodes of its autograd graphs anew.
def test_untracked_forwards_of_another_thread_are_not_recomputed() -> None:
    layer: Any = normscope.BatchNorm1d(3, scope="local")

    def run_some() -> None:
        for _ in range(40):
            torch.ones(1, requires_grad=True) * 2
            run_untracked(layer)

    def train_some() -> None:
        for _ in range(8):
            x = torch.randn(4, 3, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False).sum().backward()

    for run in (run_some, train_some):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(run).result()

    assert layer.num_batches_tracked == 8


def test_layers_after_a_mask_find_the_forward_that_they_recompute() -> None:
    first, second = normscope.BatchNorm1d(3), normscope.BatchNorm1d(3)
    track_with_gradients_only(first, second)
    x, mask = torch.randn(4, 3, 5, requires_grad=True), torch.ones(4, 1, 5, dtype=torch.bool)

    def block(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = second(first(x, mask=mask), mask=mask)
        return y

    y: Any = checkpoint(block, x, use_reentrant=True)
    y.sin().sum().backward()

    assert first.num_batches_tracked == 1
    assert second.num_batches_tracked == 1
