# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of batches train like one process with the joined batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import data_parallel
from rank_pool import RankPool
from torch import distributed, nn
from torch.distributed.algorithms.join import Join

import normscope
from normscope.functional import batch_norm

# The samples of each batch of each rank, and whether the ranks get rank 0's buffers.
TRAININGS = [
    (((3, 2), (4,)), True),
    (((3, 2, 1), (), (4, 5)), False),
    (((), (2, 1, 4), (), (1, 6, 0, 3)), True),
]

# Relative to the largest entry, in float64 (eps 2e-16): a few steps of three layers amplify little.
RELATIVE = 1e-10

Samples = tuple[torch.Tensor, torch.Tensor]
State = dict[str, torch.Tensor]


def samples(rank: int, step: int, count: int) -> Samples:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(count, 3, 8, 8, dtype=torch.float64, generator=generator)
    return x + rank, torch.randint(5, (count,), generator=generator)


def batches_of(rank: int, sizes: tuple[int, ...]) -> list[Samples]:
    return [samples(rank, step, count) for step, count in enumerate(sizes)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 9, 5),
    ).double()


def train(net: nn.Module, steps: Iterator[tuple[Samples, float]]) -> int:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    count = 0
    for (x, target), weight in steps:
        optimizer.zero_grad()
        (nn.functional.cross_entropy(net(x), target, reduction="sum") * weight).backward()
        optimizer.step()
        count += 1
    return count


def train_rank(sizes: tuple[tuple[int, ...], ...], sends_buffers: bool) -> tuple[State, int]:  # noqa: FBT001
    net = normscope.convert(network(), "world")
    parallel = data_parallel(net, sends_buffers=sends_buffers)
    own = batches_of(distributed.get_rank(), sizes[distributed.get_rank()])
    count = train(parallel, normscope.joined(own, like=samples(0, 0, 1)))
    return net.state_dict(), count


def joined_by_hand(sizes: tuple[tuple[int, ...], ...]) -> Iterator[tuple[Samples, float]]:
    ranks = [batches_of(rank, of_rank) for rank, of_rank in enumerate(sizes)]
    for step in range(max(map(len, ranks))):
        there = [batches[step] for batches in ranks if step < len(batches)]
        x, target = (torch.cat(parts) for parts in zip(*there, strict=True))
        yield (x, target), 1 / len(x)


@pytest.mark.parametrize(("sizes", "sends_buffers"), TRAININGS)
def test_ranks_with_different_numbers_of_batches_train_like_one_process(
    ranks: RankPool,
    environment: dict[str, str],
    sizes: tuple[tuple[int, ...], ...],
    *,
    sends_buffers: bool,
) -> None:
    net = network()
    steps = train(net, joined_by_hand(sizes))
    expected = net.state_dict()

    answers = ranks.run(len(sizes), train_rank, sizes, sends_buffers, environment=environment)

    for got, count in answers:
        assert count == steps
        for name, value in expected.items():
            allowed = RELATIVE * value.abs().amax().item()
            torch.testing.assert_close(got[name], value, rtol=0, atol=allowed, msg=name)
            assert torch.equal(got[name], answers[0][0][name])


def loops_of_rank(sizes: tuple[tuple[int, ...], ...]) -> list[list[tuple[int, float]]]:
    """Return the samples and weights of each step, of two loops."""
    own = [torch.zeros(count, 2) for count in sizes[distributed.get_rank()]]
    like = torch.zeros(9, 2) if any(sizes) else None
    return [[(len(x), w) for x, w in normscope.joined(own, like=like)] for _ in range(2)]


@pytest.mark.parametrize(
    ("sizes", "samples", "weights"),
    [
        # 3 ranks and 5 samples; no rank has a sample in the second step.
        (((2,), (3, 0), ()), [[2, 0], [3, 0], [0, 0]], [3 / 5, 0.0]),
        (((), (), ()), [[], [], []], []),
    ],
)
def test_in_each_loop_all_ranks_have_the_same_number_of_steps_and_the_same_weights(
    ranks: RankPool,
    environment: dict[str, str],
    sizes: tuple[tuple[int, ...], ...],
    samples: list[list[int]],
    weights: list[float],
) -> None:
    answers = ranks.run(3, loops_of_rank, sizes, environment=environment)

    expected = [list(zip(of_rank, weights, strict=True)) for of_rank in samples]
    assert answers == [[steps, steps] for steps in expected]


def train_with_join(scope: str, keywords: dict[str, bool], how: str) -> tuple[int, str, float]:
    net: Any = normscope.convert(network(), scope)
    model: Any = net if how == "optimizer" else data_parallel(net, sends_buffers=False)
    step: Any = model
    joinable = model
    if how == "optimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns

        optimizer: Any = ZeroRedundancyOptimizer
        joinable = optimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    if how == "compiled":
        step = torch.compile(model, backend="aot_eager")
        step(samples(0, 0, 2)[0]).sum().backward()  # compiled outside of the block
    if how == "function":
        step = partial(batch_norm, running_mean=None, running_var=None, training=True, scope=scope)
    even = not keywords.get("enable", True)
    count, begin, text = 0, time.monotonic(), ""
    try:
        with Join([joinable], **keywords):
            for _ in range(1 if even else 1 + distributed.get_rank()):
                step(samples(distributed.get_rank(), count, 2)[0]).sum().backward()
                if how == "optimizer":
                    joinable.step()
                count += 1
    except RuntimeError as error:
        text = str(error)
    seconds = time.monotonic() - begin
    distributed.barrier()
    return count, text, seconds


@pytest.mark.filterwarnings("ignore:Detected uneven inputs")
@pytest.mark.parametrize(
    ("scope", "keywords", "how", "counts", "text"),
    [
        ("world", {}, "data parallel", [0, 0], "normscope.joined"),
        ("world", {}, "compiled", [0, 0], "normscope.joined"),
        ("world", {}, "optimizer", [0, 0], "normscope.joined"),
        ("world", {}, "function", [0, 0], "normscope.joined"),
        ("world", {"throw_on_early_termination": True}, "data parallel", [1, 1], "exhausted"),
        ("world", {"enable": False}, "data parallel", [1, 1], ""),
        ("world", {"enable": False}, "compiled", [1, 1], ""),
        ("local", {}, "data parallel", [1, 2], ""),
    ],
)
def test_layers_that_synchronize_refuse_join(
    ranks: RankPool,
    scope: str,
    keywords: dict[str, bool],
    how: str,
    counts: list[int],
    text: str,
) -> None:
    answers = ranks.run(2, train_with_join, scope, keywords, how)

    assert [count for count, _, _ in answers] == counts
    for _, error, seconds in answers:
        assert text in error
        assert seconds < 10  # far below the group's limit of a minute
        assert bool(error) == bool(text)
