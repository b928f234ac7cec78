# SPDX-License-Identifier: Apache-2.0
"""slices:K compared to torch.nn's layer on each slice of torch.chunk."""

import copy
from typing import get_args

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

import normscope
from normscope.layers import SliceStats

pytestmark = pytest.mark.on_device

# For entries of order one in float64; both sides are off by a few roundings (eps 2e-16).
ABSOLUTE = 1e-12


def torch_on_slices(
    layer: _BatchNorm, x: torch.Tensor, count: int, slice_stats: str
) -> torch.Tensor:
    """Run torch's layer on each slice, and update its running statistics as the rule says."""
    slices = x.chunk(count)
    if slice_stats == "sequential":
        return torch.cat([layer(part) for part in slices])
    assert layer.running_mean is not None
    assert layer.running_var is not None
    before = layer.running_mean.clone(), layer.running_var.clone()
    y = torch.cat(
        [
            torch.nn.functional.batch_norm(p, None, None, layer.weight, layer.bias, training=True)
            for p in slices
        ]
    )
    # One update, with the moments of all samples or of the first slice.
    layer.running_mean.copy_(before[0])
    layer.running_var.copy_(before[1])
    layer(x if slice_stats == "pooled" else slices[0])
    return y


@pytest.mark.parametrize("slice_stats", get_args(SliceStats))
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize(("samples", "count"), [(8, 4), (7, 3), (9, 4), (3, 8), (5, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_slices_match_torch_on_each_chunk(
    slice_stats: SliceStats,
    momentum: float | None,
    samples: int,
    count: int,
    last: bool,  # noqa: FBT001
) -> None:
    expected_layer = torch.nn.BatchNorm2d(3, momentum=momentum, dtype=torch.float64)
    layer = normscope.BatchNorm2d(
        3, momentum=momentum, dtype=torch.float64, scope=f"slices:{count}", slice_stats=slice_stats
    )
    for _ in range(2):
        x = torch.randn(samples, 3, 4, 5, dtype=torch.float64) + 3
        if last:
            x = x.to(memory_format=torch.channels_last)
        dy = torch.randn_like(x)
        x_expected, x_got = x.clone().requires_grad_(), x.clone().requires_grad_()

        expected = torch_on_slices(expected_layer, x_expected, count, slice_stats)
        got = layer(x_got)

        expected.backward(dy)
        got.backward(dy)
        assert_near(got, expected)
        assert_near(x_got.grad, x_expected.grad)
        for (name, theirs), ours in zip(
            expected_layer.named_parameters(), layer.parameters(), strict=True
        ):
            assert ours.grad is not None, name
            # Each gradient is a sum of 160 products.
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=160 * ABSOLUTE)
    for name, value in expected_layer.state_dict().items():
        assert_near(layer.state_dict()[name], value)


def assert_near(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=ABSOLUTE)


def test_a_slice_of_one_value_raises_and_updates_nothing() -> None:
    layer = normscope.BatchNorm1d(3, scope="slices:2", slice_stats="sequential")
    before = copy.deepcopy(layer.state_dict())

    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(torch.randn(3, 3))

    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
