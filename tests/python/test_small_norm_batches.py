# SPDX-License-Identifier: Apache-2.0
"""Norm batches of one value per channel, by all kernels, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch_device
from rank_pool import KERNELS, RankPool, error_of
from torch import distributed

import normscope

Sizes = tuple[int, ...]
Tensors = dict[str, torch.Tensor]

# One norm batch of ranks 0 and 1, and one of rank 2 alone.
SCOPE = "group:2"

FRESH = normscope.BatchNorm1d(3).state_dict()

both_ways = pytest.mark.parametrize("compiled", [False, True])


@pytest.fixture(params=list(KERNELS))
def pool(request: pytest.FixtureRequest, pools: dict[str, RankPool]) -> RankPool:
    """Ranks with each kind of kernels in turn."""
    return pools[request.param]


def steps(
    cases: tuple[Sizes, ...],
    compiled: bool,  # noqa: FBT001 - of a task
    device: str = "cpu",
) -> Iterator[tuple[normscope.BatchNorm, Callable[..., torch.Tensor], torch.Tensor]]:
    """Yield a fresh layer, what calls it and its input, for each case: the samples of each rank."""
    for sizes in cases:
        layer = normscope.BatchNorm1d(3, scope=SCOPE).to(device)
        call: Callable[..., torch.Tensor] = layer
        if compiled:
            call = torch.compile(layer, backend="aot_eager", dynamic=True)
        yield layer, call, torch.randn(sizes[distributed.get_rank()], 3).to(device)
    if compiled:
        torch.compiler.reset()


def refusals(cases: tuple[Sizes, ...], compiled: bool) -> list[tuple[str, Tensors, bool]]:  # noqa: FBT001
    """Return the error of a forward, the state after it, and whether a later forward works."""
    results = []
    for layer, call, x in steps(cases, compiled):
        error = error_of(partial(call, x), ValueError)
        state = {name: value.clone() for name, value in layer.state_dict().items()}
        results.append((error, state, bool(call(torch.randn(4, 3)).isfinite().all())))
    return results


@both_ways
def test_one_value_per_channel_is_refused_and_updates_nothing(
    pool: RankPool, *, compiled: bool
) -> None:
    cases = (1, 0, 4), (0, 1, 4), (2, 2, 1)

    answers = pool.run(3, refusals, cases, compiled)

    for case, sizes in enumerate(cases):
        for rank in range(3):
            error, state, works_later = answers[rank][case]
            is_refused = (sizes[2] if rank == 2 else sizes[0] + sizes[1]) == 1
            assert ("ore than 1 value per channel" in error) == is_refused
            assert all(torch.equal(state[name], FRESH[name]) for name in FRESH) == is_refused
            assert works_later


def later_refusal(compiled: bool) -> tuple[str, Tensors]:  # noqa: FBT001
    """Return the error of the call after one on a device, and the state after both."""
    torch_device.load()
    [(layer, call, x)] = steps(((1, 0, 4),), compiled, torch_device.NAME)
    layer.process_group = distributed.new_group(backend=torch_device.BACKENDS)
    call(x)
    error = error_of(lambda: call(x), ValueError)
    return error, {name: value.cpu() for name, value in layer.state_dict().items()}


@both_ways
def test_one_value_per_channel_on_a_device_is_refused_by_the_next_call(
    devices: RankPool, *, compiled: bool
) -> None:
    answers = devices.run(3, later_refusal, compiled)

    for error, state in answers[:2]:
        assert "more than 1 value per channel" in error
        assert "got 1 in an earlier call, forward of" in error
        assert all(torch.equal(state[name], FRESH[name]) for name in FRESH if "running" in name)
