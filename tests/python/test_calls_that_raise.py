# SPDX-License-Identifier: Apache-2.0
"""A call that raises, wherever it does, has updated nothing, and the peers are told at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing_memory import FailingMemory
from rank_pool import RankPool, connected_group, error_of
from torch import distributed

import normscope

# Far longer than peers wait that are told at once, even on a busy machine, and far shorter than the
# limit of their group.
AT_ONCE = 10.0

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
    layer(X)  # whose buffers are then not those of a new layer
    return layer


def buffers_that_changed(name: str, dtype: torch.dtype) -> list[str]:
    """Let each request for memory in a call fail; return the buffers that were then updated."""
    x = X.to(dtype)
    others = {n: v.to(dtype) if v.dtype == X.dtype else v for n, v in CALLS[name][2].items()}
    layer = layer_of(name)
    with FailingMemory() as counting:
        layer(x, **others)
    assert counting.requests
    changed = []
    for number in range(counting.requests):
        layer = layer_of(name)
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        with FailingMemory(number):
            error = error_of(lambda layer=layer: layer(x, **others), RuntimeError)  # type: ignore[misc]
        assert "found no memory" in error, number
        changed += [n for n, buffer in layer.named_buffers() if not torch.equal(buffer, before[n])]
    return changed


@pytest.mark.parametrize("kernels", ["own", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_memory_has_updated_nothing(
    pools: dict[str, RankPool], kernels: str, name: str, dtype: torch.dtype
) -> None:
    assert pools[kernels].run(1, buffers_that_changed, name, dtype) == [[]]


def buffers_that_changed_unsaved(name: str) -> list[str]:
    """Make each tensor one that autograd cannot save; return the buffers that were updated."""
    others = CALLS[name][2]
    saved = ["weight"]
    if "mask" not in others:  # which takes its rows out of x
        saved.append("x")
    if name == "activated":
        saved.append("bias")
    changed = []
    for argument in saved:
        layer, x = layer_of(name), X
        with torch.inference_mode():
            if argument == "x":
                x = X.clone()
            else:
                setattr(layer, argument, torch.nn.Parameter(torch.ones(3)))
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        error = error_of(lambda layer=layer, x=x: layer(x, **others), RuntimeError)  # type: ignore[misc]
        assert f"{argument}: expected a tensor that can be saved for backward" in error
        changed += [n for n, buffer in layer.named_buffers() if not torch.equal(buffer, before[n])]
    return changed


@pytest.mark.parametrize("kernels", ["own", "native"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_tensors_that_autograd_cannot_save_has_updated_nothing(
    pools: dict[str, RankPool], kernels: str, name: str
) -> None:
    assert pools[kernels].run(1, buffers_that_changed_unsaved, name) == [[]]


def forward(layer: normscope.BatchNorm) -> Callable[[], object]:
    return lambda: layer(X)


def masked(layer: normscope.BatchNorm) -> Callable[[], object]:
    return lambda: layer(X, mask=MASK)


def backward(layer: normscope.BatchNorm) -> Callable[[], object]:
    y = layer(X.clone().requires_grad_())
    return lambda: y.backward(X)


def double_backward(layer: normscope.BatchNorm) -> Callable[[], object]:
    x = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x), x, X, create_graph=True)
    return lambda: gradient.backward(X)


def pooling(layer: normscope.BatchNorm) -> Callable[[], object]:
    layer(X)
    return lambda: normscope.sync_running_stats(layer, layer.process_group)


Prepare = Callable[[normscope.BatchNorm], Callable[[], object]]
STEPS: dict[str, Prepare] = {
    step.__name__: step for step in (forward, masked, backward, double_backward, pooling)
}


def failures_of_rank_1(name: str) -> list[tuple[str, str, float]]:
    """Let each request for memory in a step fail on rank 1.

    Returns the errors of the step and of the next one, and the seconds that both took.
    """
    rank = distributed.get_rank()

    def step_of_new_group() -> tuple[normscope.BatchNorm, Callable[[], object]]:
        layer = normscope.BatchNorm1d(3, process_group=connected_group([0, 1]))
        layer.layer_name = "stem"
        layer(X)
        return layer, STEPS[name](layer)

    _, step = step_of_new_group()
    with FailingMemory() as counting:
        step()
    requests = [counting.requests]
    distributed.broadcast_object_list(requests, 1)
    results = []
    for number in range(requests[0]):
        layer, step = step_of_new_group()
        distributed.barrier()
        begin = time.monotonic()
        with FailingMemory(number if rank == 1 else None):
            error = error_of(step, RuntimeError)
        later = error_of(lambda layer=layer: layer(X), RuntimeError)  # type: ignore[misc]
        results.append((error, later, time.monotonic() - begin))
        distributed.barrier()
    return results


@pytest.mark.parametrize(
    ("kernels", "transport"), [("own", "shared memory"), ("own", "gloo"), ("native", "gloo")]
)
@pytest.mark.parametrize("name", STEPS)
def test_peers_of_a_rank_without_memory_are_told_at_once(
    pools: dict[str, RankPool], kernels: str, name: str, environment: dict[str, str]
) -> None:
    peer, failing = pools[kernels].run(
        2, failures_of_rank_1, name, group_seconds=30, environment=environment
    )

    for (own, own_later, _), (error, later, seconds) in zip(failing, peer, strict=True):
        assert "found no memory" in own
        assert seconds < AT_ONCE
        if own_later:  # the group has failed
            # If memory was needed after the exchange, the peer finds out in the next one.
            assert "rank 1" in (error or later)
            assert "found no memory" in (error or later)
        else:  # the request was not the layer's
            assert not error
            assert not later
    assert any(own_later for _, own_later, _ in failing)
