# SPDX-License-Identifier: Apache-2.0
"""A call that raises, wherever it does, has updated nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing_operations import FailingOperations
from rank_pool import RankPool, error_of

import normscope

X = torch.randn(6, 3, 5)

MASK = torch.arange(5).expand(6, 1, 5) < 3

# What a layer is, and the other arguments of its call.
Settings = dict[str, Any]
CALLS: dict[str, tuple[Callable[..., normscope.BatchNorm], Settings, Settings]] = {
    "alone": (normscope.BatchNorm1d, {"scope": "local"}, {}),
    "average": (normscope.BatchNorm1d, {"scope": "local", "momentum": None}, {}),
    "pooled": (normscope.BatchNorm1d, {"scope": "slices:3"}, {}),
    "first": (normscope.BatchNorm1d, {"scope": "slices:3", "slice_stats": "first"}, {}),
    "sequential": (normscope.BatchNorm1d, {"scope": "slices:3", "slice_stats": "sequential"}, {}),
    "masked": (normscope.BatchNorm1d, {"scope": "local"}, {"mask": MASK}),
    "masked slices": (normscope.BatchNorm1d, {"scope": "slices:2"}, {"mask": MASK}),
    "activated": (normscope.BatchNormAct1d, {"scope": "local", "activation": "silu"}, {}),
    "residual": (normscope.BatchNormAct1d, {"scope": "local"}, {"residual": X}),
    "broadcast": (normscope.BatchNormAct1d, {"scope": "local"}, {"residual": X[:, :1]}),
}


def layer_of(name: str) -> normscope.BatchNorm:
    kind, settings, _ = CALLS[name]
    layer = kind(3, **settings)
    layer(X)  # the buffers are no longer those of a new layer
    return layer


def buffers_that_changed(name: str, dtype: torch.dtype) -> list[str]:
    """Let each operation of a call fail; return the buffers that were then updated."""
    x = X.to(dtype)
    others = {n: v.to(dtype) if v.dtype == X.dtype else v for n, v in CALLS[name][2].items()}
    layer = layer_of(name)
    with FailingOperations() as counting:
        layer(x, **others)
    changed = []
    for number in range(counting.seen):
        layer = layer_of(name)
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        with FailingOperations(number) as failing:
            error = error_of(lambda layer=layer: layer(x, **others), RuntimeError)  # type: ignore[misc]
        assert "found no memory" in error, (number, failing.seen)
        changed += [n for n, buffer in layer.named_buffers() if not torch.equal(buffer, before[n])]
    return changed


@pytest.mark.parametrize("kernels", ["own", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_memory_has_updated_nothing(
    pools: dict[str, RankPool], kernels: str, name: str, dtype: torch.dtype
) -> None:
    assert pools[kernels].run(1, buffers_that_changed, name, dtype) == [[]]
