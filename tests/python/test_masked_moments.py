# SPDX-License-Identifier: Apache-2.0
"""Masks over the replicas of torch.nn.DataParallel."""

from __future__ import annotations

import copy

import pytest
import torch
from replicas import replicas_of, run_replicas
from torch import nn

import normscope

pytestmark = pytest.mark.on_device


def masked_input() -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input that is not finite where its mask is False."""
    mask = torch.rand(7, 1, 5, 4) > 0.5
    return torch.where(mask, torch.randn(7, 3, 5, 4) + 2, float("nan")), mask


def assert_same_statistics(got: normscope.BatchNorm, expected: normscope.BatchNorm) -> None:
    for name, value in expected.named_buffers():
        assert torch.equal(got.get_buffer(name), value), name
    assert got.elements_seen == expected.elements_seen


@pytest.mark.own_kernels
@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize("scope", ["world", "local"])
def test_replicas_share_the_unmasked_values(activated: bool, scope: str) -> None:  # noqa: FBT001
    x, mask = masked_input()
    layer_class = normscope.BatchNormAct2d if activated else normscope.BatchNorm2d
    layer = layer_class(3, scope=scope)
    alone = copy.deepcopy(layer)
    residuals = [x] if activated else []
    sizes = [2, 1, 4]
    answers = []
    for call in (over_replicas, in_parts if scope == "local" else in_one):
        model = layer if call is over_replicas else alone
        leaves = [leaf.clone().requires_grad_() for leaf in (x, *residuals)]
        y = call(model, leaves, mask, sizes)
        dy = y.detach().sin()
        answers.append([y, *torch.autograd.grad(y, [*leaves, *model.parameters()], dy)])

    for got, expected in zip(*answers, strict=True):
        torch.testing.assert_close(got, expected)
    if scope == "world":
        assert_same_statistics(layer, alone)


def over_replicas(
    layer: nn.Module, leaves: list[torch.Tensor], mask: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    # A single number selects the part.
    parts = list(zip(*(t.split(sizes) for t in (*leaves, mask)), strict=True))
    calls = [
        lambda index, f=replica: f(*parts[int(index)][:-1], mask=parts[int(index)][-1])
        for replica in replicas_of(layer, len(sizes))
    ]
    outputs = run_replicas(calls, torch.arange(len(sizes)).split(1))
    assert all(isinstance(y, torch.Tensor) for y in outputs), outputs
    return torch.cat(outputs)


def in_one(
    layer: nn.Module, leaves: list[torch.Tensor], mask: torch.Tensor, _sizes: list[int]
) -> torch.Tensor:
    y: torch.Tensor = layer(*leaves, mask=mask)
    return y


def in_parts(
    layer: nn.Module, leaves: list[torch.Tensor], mask: torch.Tensor, sizes: list[int]
) -> torch.Tensor:
    parts = zip(*(t.split(sizes) for t in (*leaves, mask)), strict=True)
    return torch.cat([layer(*part[:-1], mask=part[-1]) for part in parts])


def test_a_wrong_mask_of_one_replica_ends_the_wait_of_the_others() -> None:
    x, mask = masked_input()
    layer = normscope.BatchNorm2d(3)
    given = [mask[:4], mask[:4]]
    calls = [
        lambda part, f=replica, m=m: f(part, mask=m)
        for replica, m in zip(replicas_of(layer, 2), given, strict=True)
    ]

    waiting, failed = run_replicas(calls, x.split([4, 3]))

    assert "mask: expected shape [3, 1, 5, 4]" in str(failed)
    assert "another has failed: ValueError: mask: expected shape" in str(waiting)
