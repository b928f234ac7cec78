# SPDX-License-Identifier: Apache-2.0
"""Under torch.nn.DataParallel, the replicas of a layer share statistics like ranks."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from refusals import unchanged
from replicas import replicas_of, run_replicas
from torch import nn
from torch.utils.checkpoint import checkpoint

import normscope
from normscope import layers

pytestmark = pytest.mark.on_device

SIZES = [3, 0, 4]


def forward(model: nn.Module, x: torch.Tensor, sizes: list[int] = SIZES) -> list[Any]:
    return run_replicas(replicas_of(model, len(sizes)), x.split(sizes))


def joined_output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    outputs = forward(model, x)
    assert all(isinstance(y, torch.Tensor) for y in outputs), outputs
    return torch.cat(outputs)


def errors_of(outputs: list[Any]) -> list[str]:
    assert all(isinstance(error, Exception) for error in outputs), outputs
    return [f"{type(error).__name__}: {error}" for error in outputs]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        normscope.BatchNormAct2d(4, activation="silu"),
        nn.Conv2d(4, 4, 3),
        normscope.BatchNorm2d(4),
    ).double()


@pytest.mark.own_kernels
def test_a_replica_that_is_not_in_the_loss_counts() -> None:
    layer = normscope.BatchNorm1d(3).double()
    x = torch.randn(sum(SIZES), 3, 4, dtype=torch.float64, requires_grad=True)
    first, *_ = forward(layer, x)
    [found] = torch.autograd.grad(first.sin().sum(), x)
    [expected] = torch.autograd.grad(layer(x)[: SIZES[0]].sin().sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scope", ["local", "slices:2", "norm_batch:2"])
def test_narrow_scopes_stay_within_a_replica(scope: str) -> None:
    layer = normscope.BatchNormAct1d(3, activation="silu", scope=scope)
    expected, other = copy.deepcopy(layer), copy.deepcopy(layer)
    x = torch.randn(8, 3, 5)
    y = torch.cat(forward(layer, x, [4, 4]))
    assert torch.equal(y, torch.cat([expected(x[:4]), other(x[4:])]))
    assert all(map(torch.equal, layer.buffers(), expected.buffers()))


def test_a_replica_that_fails_ends_the_forward_of_the_others() -> None:
    start = time.monotonic()
    outputs = forward(network(), torch.randn(4, 2, 8, 8).double(), [2, 2])
    assert all("expected input" in error for error in errors_of(outputs))

    ours, other = replicas_of(normscope.BatchNorm1d(3), 2)
    outputs = run_replicas([ours, lambda x: other(nn.Linear(4, 3)(x))], [torch.randn(2, 3)] * 2)
    first, second = errors_of(outputs)
    assert "mat1 and mat2 shapes cannot be multiplied" in second
    assert "replicas 1 did not call it: they have failed" in first
    assert time.monotonic() - start < 20


def test_a_slow_replica_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.replicas, "_POLL", 0.01)
    is_running = threading.Event()
    layer = normscope.BatchNorm1d(3)
    first, second = replicas_of(layer, 2)

    def wait(x: torch.Tensor) -> Any:
        assert is_running.wait(60)
        return first(x)

    def work(x: torch.Tensor) -> Any:
        is_running.set()
        time.sleep(2 * layers.replicas._POLLS_ALONE * layers.replicas._POLL)
        return second(x)

    outputs = run_replicas([wait, work], [torch.randn(2, 3)] * 2)

    assert all(isinstance(y, torch.Tensor) for y in outputs), outputs


MASK = torch.ones(4, 1, 5, 4, dtype=torch.bool)
X = torch.randn(2, 3)
HAS_FAILED = "expected all 2 replicas of torch.nn.DataParallel in a forward; another has failed: "

# The arguments of each of two replicas, and what each of them raises.
REFUSED: list[tuple[Callable[[], Any], list[tuple[torch.Tensor, ...]], list[str]]] = [
    (
        lambda: normscope.BatchNorm1d(3),
        [(X,), (X.double(),)],
        ["expected 3 channels of torch.float32, as replica 0 has, got 3 of torch.float64"] * 2,
    ),
    (
        lambda: normscope.BatchNorm1d(3),
        [(X,), (torch.ones(2, 3, 1, 1),)],
        [
            f"{HAS_FAILED}ValueError: x: expected 2 or 3 dimensions",
            "x: expected 2 or 3 dimensions, got 4",
        ],
    ),
    (
        lambda: normscope.BatchNorm1d(3),
        [(X[:1],), (X[:0],)],
        ["Expected more than 1 value per channel"] * 2,
    ),
    (
        lambda: normscope.BatchNorm1d(3, scope="group:2"),
        [(X,), (X,)],
        ["scope: expected world, node, local or slices under torch.nn.DataParallel"] * 2,
    ),
    (
        lambda: normscope.BatchNormAct1d(3),
        [(X, torch.ones(3)), (X, torch.ones(7))],
        [f"{HAS_FAILED}RuntimeError", "broadcast"],
    ),
    (
        lambda: normscope.BatchNorm2d(3),
        [(torch.randn(4, 3, 5, 4), MASK), (torch.randn(3, 3, 5, 4), MASK)],
        [f"{HAS_FAILED}ValueError: mask: expected shape", "mask: expected shape [3, 1, 5, 4]"],
    ),
]


@pytest.mark.parametrize(("make", "arguments", "texts"), REFUSED)
def test_refusals_end_the_wait_of_the_others_and_update_nothing(
    make: Callable[[], Any], arguments: list[tuple[torch.Tensor, ...]], texts: list[str]
) -> None:
    layer = make()
    calls = [lambda given, f=f: f(*given) for f in replicas_of(layer, 2)]

    with unchanged(layer):
        errors = errors_of(run_replicas(calls, arguments))

    for text, error in zip(texts, errors, strict=True):
        assert text in error


def refusals_of_rank() -> list[str]:
    return errors_of(forward(normscope.BatchNorm1d(3), torch.randn(4, 3), [2, 2]))


def test_replicas_in_several_processes_are_refused(ranks: RankPool) -> None:
    for errors in ranks.run(2, refusals_of_rank):
        assert all("process_group: expected one rank under" in error for error in errors)


def test_recomputation_is_refused() -> None:
    layer = normscope.BatchNorm1d(3)
    replicas = [
        lambda x, replica=replica: checkpoint(replica, x, use_reentrant=False)
        for replica in replicas_of(layer, 2)
    ]
    outputs = run_replicas(replicas, [torch.randn(2, 3, requires_grad=True) for _ in range(2)])
    with pytest.raises(RuntimeError, match="scope: expected local or slices for a layer that is"):
        torch.cat(outputs).sum().backward()


def test_backward_can_be_repeated_but_not_differentiated() -> None:
    x = torch.randn(sum(SIZES), 3, requires_grad=True)
    loss = joined_output(normscope.BatchNorm1d(3), x).sin().sum()
    [once] = torch.autograd.grad(loss, x, retain_graph=True)
    [twice] = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(once, twice)
    [differentiable] = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        differentiable.sum().backward()


@pytest.mark.own_kernels
def test_dropped_replicas_are_not_waited_for() -> None:
    layer = normscope.BatchNorm1d(3)
    x = torch.randn(sum(SIZES), 3)
    replicas_of(layer, 2)
    assert torch.equal(joined_output(layer, x), layer(x))
