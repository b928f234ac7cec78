# SPDX-License-Identifier: Apache-2.0
"""Devices of one host that exchange messages in each other's memory (NORMSCOPE_PEER_MEMORY=1).

If tensors of the CPU stand for a device's, shared memory of the host stands for its memory.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from gpu_ranks import on_host
from rank_pool import RankPool, error_of
from torch import distributed

import normscope

pytestmark = [pytest.mark.on_device, pytest.mark.own_kernels]

PEERS = {"NORMSCOPE_PEER_MEMORY": "1"}
LIMIT = {**PEERS, "NORMSCOPE_TIMEOUT": "3"}
SIZES = [3, 0, 2, 4]  # samples of each rank
STEPS = 3

Tensors = list[torch.Tensor]


def batch(channels: int, rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    parts: tuple[torch.Tensor, ...] = (torch.randn(sum(SIZES), channels, 2, 8) + 30).split(SIZES)
    return parts[rank]


def steps(channels: int, scope: str, ranks: list[int]) -> list[Tensors]:
    """Return y, dx, and the parameters' gradients and buffers, of some steps with their samples."""
    layer = normscope.BatchNorm2d(channels, scope=scope)
    found = []
    for number in range(STEPS):
        x = torch.cat([batch(channels, rank) for rank in ranks]) * (1 + number)
        x.requires_grad_()
        y = layer(x)
        layer.zero_grad()
        (y * torch.linspace(-1, 1, 8)).sum().backward()
        assert x.grad is not None
        found.append([y.detach(), x.grad, *(buffer.clone() for buffer in layer.buffers())])
    return found


def shared_allocations() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:cuda_on_host")


def steps_of_rank(
    channels: int, scope: str, without: int | None = None
) -> tuple[list[Tensors], int]:
    """Return the steps of this rank, and how much shared memory they have allocated or opened."""
    rank = distributed.get_rank()
    if rank == without:
        del os.environ["NORMSCOPE_PEER_MEMORY"]
    before = shared_allocations()
    found = steps(channels, scope, [rank])
    return found, shared_allocations() - before


def assert_bits_of_joined(found: list[list[Tensors]], channels: int, ranks: list[int]) -> None:
    sizes = [SIZES[rank] for rank in ranks]
    for number, (y, dx, *buffers) in enumerate(steps(channels, "local", ranks)):
        for rank, *parts in zip(ranks, y.split(sizes), dx.split(sizes), strict=True):
            for actual, expected in zip(found[rank][number], [*parts, *buffers], strict=True):
                assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("scope", "groups", "allocations"),
    [
        # Of the world, and of a part.
        ("world", [[0, 1, 2, 3]], 4),
        ("group:2", [[0, 1], [2, 3]], 4 + 2),
        ("ranks:0,2,3", [[0, 2, 3]], 4 + 3),
    ],
)
@pytest.mark.parametrize("channels", [1, 130])
def test_ranks_have_the_bits_of_the_joined_batch(
    ranks: RankPool, channels: int, scope: str, groups: list[list[int]], allocations: int
) -> None:
    answers = ranks.run(4, steps_of_rank, channels, scope, environment=PEERS)

    for members in groups:
        assert_bits_of_joined([found for found, _ in answers], channels, members)
        if on_host():
            assert {answers[rank][1] for rank in members} == {allocations}


def test_longer_messages_go_through_the_backend(ranks: RankPool) -> None:
    answers = ranks.run(4, steps_of_rank, 4097, "world", environment=PEERS)

    assert_bits_of_joined([found for found, _ in answers], 4097, [0, 1, 2, 3])


def test_all_ranks_must_want_it(ranks: RankPool) -> None:
    answers = ranks.run(4, steps_of_rank, 3, "world", 2, environment=PEERS)

    assert_bits_of_joined([found for found, _ in answers], 3, [0, 1, 2, 3])
    assert [allocated for _, allocated in answers] == [0, 0, 0, 0]


def two_layers() -> list[torch.nn.Module]:
    layers: list[torch.nn.Module] = [normscope.BatchNorm1d(3), normscope.BatchNorm1d(6)]
    for layer, channels in zip(layers, [3, 6], strict=True):
        layer(torch.randn(2, channels, 4))
    return layers


def first_error(call: partial[object]) -> str:
    """Return the error of a call that does not fit, or of one of the next ones."""
    return error_of(lambda: [call() for _ in range(50)], RuntimeError)


def in_different_layers() -> str:
    layers = two_layers()
    rank = distributed.get_rank()
    return first_error(partial(layers[rank], torch.randn(2, 3 * (1 + rank), 4)))


def test_ranks_in_different_layers_are_told(ranks: RankPool) -> None:
    for error in ranks.run(2, in_different_layers, environment=PEERS):
        assert "made different calls" in error


def after_a_rank_that_raises() -> str:
    layer = two_layers()[0]
    if distributed.get_rank() == 1:
        error = error_of(lambda: layer(torch.randn(2, 5, 4)), RuntimeError)
    else:
        error = first_error(partial(layer, torch.randn(2, 3, 4)))
    distributed.barrier()
    return error


def test_an_error_of_a_rank_reaches_its_peers(ranks: RankPool) -> None:
    own, *others = ranks.run(2, after_a_rank_that_raises, environment=PEERS)[::-1]

    assert "expected 3 channels" in own
    for error in others:
        assert "rank 1" in error
        assert "expected 3 channels" in error


def without_rank_one() -> str:
    layer = two_layers()[0]
    error = ""
    if distributed.get_rank() != 1:
        error = first_error(partial(layer, torch.randn(2, 3, 4)))
    distributed.barrier()
    return error


def test_a_rank_that_does_not_come_is_named_at_the_limit(ranks: RankPool) -> None:
    errors = ranks.run(3, without_rank_one, environment=LIMIT)

    for error in (errors[0], errors[2]):
        assert "waited 3.0 s" in error
        assert "rank 1" in error
