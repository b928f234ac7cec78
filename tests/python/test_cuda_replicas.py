# SPDX-License-Identifier: Apache-2.0
"""The replicas of torch.nn.DataParallel on devices."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from replicas import replicas_of, run_replicas

import normscope
from normscope._binding import ops

DEVICE = os.environ.get("NORMSCOPE_TEST_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available() and ops.cuda() == "built"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="cuda: no device, or not built"),
]


def step_of_replicas(layer: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run the first step of two replicas on one device, in threads."""
    leaf = x.detach().requires_grad_()
    y = torch.cat(run_replicas(replicas_of(layer, 2), leaf.split([2, len(x) - 2])))
    y.sin().sum().backward()
    assert leaf.grad is not None
    out = {"y": y, "dx": leaf.grad, **dict(layer.named_buffers())}
    return {name: value.detach().cpu() for name, value in out.items()}


def test_replicas_share_statistics_as_on_the_cpu() -> None:
    on_cpu = normscope.BatchNorm2d(3)
    on_device = copy.deepcopy(on_cpu).to(DEVICE)
    x = torch.randn(5, 3, 6, 6)
    found, expected = step_of_replicas(on_device, x.to(DEVICE)), step_of_replicas(on_cpu, x)
    for name, value in expected.items():
        # torch computes the loss on each device in its own way.
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="cuda: two devices are needed")
def test_data_parallel_trains_as_one_device() -> None:
    layer = normscope.BatchNorm2d(3).to(DEVICE)
    alone = copy.deepcopy(layer)
    x = torch.randn(5, 3, 6, 6, device=DEVICE)
    assert torch.equal(torch.nn.DataParallel(layer)(x), alone(x))
    assert all(map(torch.equal, layer.buffers(), alone.buffers()))
