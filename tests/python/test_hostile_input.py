# SPDX-License-Identifier: Apache-2.0
"""No argument from Python can crash the process: errors name the argument."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import normscope

pytestmark = pytest.mark.portable

OPS = torch.ops.normscope
N, C = 4, 3
LARGEST = 2**63 - 1


def arguments(device: str) -> dict[str, Any]:
    """Return valid arguments for all ops."""
    x = torch.randn(N, C, 5, device=device)
    channels = torch.ones(C, device=device)
    return {
        "x": x,
        "dy": torch.randn_like(x),
        "grad_dx": torch.randn_like(x),
        "weight": channels,
        "bias": channels.clone(),
        "grad_dweight": channels.clone(),
        "grad_dbias": channels.clone(),
        "running_mean": channels.clone(),
        "running_var": channels.clone(),
        "num_batches_tracked": torch.tensor(0, device=device),
        "statistics": torch.ones(1, 3, C, dtype=torch.float64, device=device),
    }


def forward(a: dict[str, Any]) -> object:
    buffers = (a["running_mean"], a["running_var"], a["num_batches_tracked"])
    constants: Any = (0.1, 1e-5, [], "pooled", "local", "", "")
    return OPS.batch_norm_forward(a["x"], a["weight"], a["bias"], *buffers, *constants)


def apply(a: dict[str, Any]) -> object:
    return OPS.batch_norm_with_statistics(a["x"], a["weight"], a["bias"], a["statistics"])


def backward(a: dict[str, Any]) -> object:
    tensors = (a["dy"], a["x"], a["weight"], a["statistics"])
    wants = (True, True, True)
    return OPS.batch_norm_backward(*tensors, *wants, "local", "", "")


def double_backward(a: dict[str, Any]) -> object:
    gradients = (a["grad_dx"], a["grad_dweight"], a["grad_dbias"])
    tensors = (a["dy"], a["x"], a["weight"], a["statistics"])
    return OPS.batch_norm_double_backward(*gradients, *tensors, "local", "", "")


TAKES = {
    forward: ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"],
    apply: ["weight", "bias", "statistics"],
    backward: ["dy", "weight", "statistics"],
    double_backward: ["grad_dx", "grad_dweight", "grad_dbias", "dy", "weight", "statistics"],
}


def damaged(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return damaged variants of the tensor, by the kind of damage."""
    other = "cpu" if tensor.device.type == "meta" else "meta"
    wrong = {
        "dtype": tensor.to(torch.int32),
        "device": torch.empty_like(tensor, device=other),
        "dimensions": tensor.unsqueeze(0).unsqueeze(0),
        "twice as long": torch.cat([tensor.reshape(-1)] * 2),
    }
    if tensor.dim() > 0:
        wrong["shorter"] = tensor[..., :-1]
        wrong["empty"] = tensor[..., :0]
    if tensor.dim() == 3:
        wrong["more"] = torch.cat([tensor] * 9)
        wrong["no slice"] = tensor[:0]
    return wrong


CASES = [
    pytest.param(op, name, damage, id=f"{op.__name__}-{name}-{damage}")
    for op, names in TAKES.items()
    for name in names
    for damage in damaged(arguments("cpu")[name])
    # For a single number, one dimension is as good as none. It may be of any dtype.
    if not (name == "num_batches_tracked" and damage in ("dimensions", "dtype"))
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("op", "name", "damage"), CASES)
def test_an_argument_that_does_not_match_is_named(
    op: Any, name: str, damage: str, device: str
) -> None:
    given = arguments(device)
    op(given)
    given[name] = damaged(given[name])[damage]
    if name == "statistics" and damage == "more" and device == "meta":
        return  # the number of slices may be symbolic there

    with pytest.raises((RuntimeError, ValueError), match=rf"\b{name}\b|slices"):
        op(given)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op", [apply, backward, double_backward])
def test_statistics_of_another_layout_are_refused(op: Any, device: str) -> None:
    given = arguments(device)
    given["statistics"] = given["statistics"].transpose(1, 2).contiguous().transpose(1, 2)

    with pytest.raises(RuntimeError, match="statistics: expected a contiguous tensor"):
        op(given)


@pytest.mark.parametrize("count", [5, 2**31, LARGEST])
def test_the_number_of_slices_is_limited_to_the_number_of_samples(count: int) -> None:
    x = torch.randn(N, C, 5)
    y = normscope.BatchNorm1d(C, scope=f"slices:{count}")(x)
    expected = normscope.BatchNorm1d(C, scope=f"slices:{N}")(x)

    assert torch.equal(y, expected)


@pytest.mark.parametrize("count", [5, LARGEST])
def test_more_slices_than_samples_can_be_traced(count: int) -> None:
    with torch.device("meta"):
        layer = normscope.BatchNorm1d(C, scope=f"slices:{count}")

        assert layer(torch.randn(N, C, 5)).shape == (N, C, 5)


PIECES = "slices: local group: node world ranks: norm_batch: , / : - 0 1 2 -1 00 +3 1e3 \x1b[2J é ∞"


def hostile_scopes(seed: int, how_many: int) -> list[str]:
    """Make damaged scopes: pieces of valid ones, extreme numbers, and odd characters."""
    choose = random.Random(seed)
    numbers = map(str, (2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30))
    pieces = [*PIECES.split(), " ", "\t", "\n", "\0", "\ud800", *numbers]
    return ["".join(choose.choices(pieces, k=choose.randint(0, 6))) for _ in range(how_many)]


def test_any_scope_is_valid_or_raises_a_value_error() -> None:
    x = torch.randn(N, C, 5)
    for text in hostile_scopes(seed=0, how_many=3000):
        try:
            scope = normscope.Scope(text)
        except ValueError:
            with pytest.raises(ValueError, match="scope"):
                normscope.BatchNorm1d(C, scope=text)
            continue
        assert normscope.Scope(str(scope)) == scope
        y = normscope.BatchNorm1d(C, scope=text)(x)
        assert y.shape == x.shape
