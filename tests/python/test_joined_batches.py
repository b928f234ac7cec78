# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of batches train like one process with the joined batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_parallel import data_parallel
from rank_pool import RankPool
from torch import distributed, nn
from torch.distributed.algorithms.join import Join

import normscope

# The samples of each batch of each rank.
SIZES = [
    ((3, 2), (4,)),
    ((3, 2, 1), (), (4, 5)),
    ((), (2, 1, 4), (), (1, 6, 0, 3)),
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


def train_rank(sizes: tuple[tuple[int, ...], ...], buffers: str) -> tuple[State, int]:
    net = normscope.convert(network(), "world")
    parallel = data_parallel(net, sends_buffers=buffers == "broadcast")
    own = batches_of(distributed.get_rank(), sizes[distributed.get_rank()])
    count = train(parallel, normscope.joined(own, like=samples(0, 0, 1)))
    return net.state_dict(), count


def joined_by_hand(sizes: tuple[tuple[int, ...], ...]) -> Iterator[tuple[Samples, float]]:
    ranks = [batches_of(rank, of_rank) for rank, of_rank in enumerate(sizes)]
    for step in range(max(map(len, ranks))):
        there = [batches[step] for batches in ranks if step < len(batches)]
        x, target = (torch.cat(parts) for parts in zip(*there, strict=True))
        yield (x, target), 1 / len(x)


@pytest.mark.parametrize("buffers", ["broadcast", "own"])
@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_with_different_numbers_of_batches_train_like_one_process(
    ranks: RankPool, sizes: tuple[tuple[int, ...], ...], buffers: str, environment: dict[str, str]
) -> None:
    net = network()
    steps = train(net, joined_by_hand(sizes))
    expected = net.state_dict()

    answers = ranks.run(len(sizes), train_rank, sizes, buffers, environment=environment)

    for got, count in answers:
        assert count == steps
        for name, value in expected.items():
            allowed = RELATIVE * value.abs().amax().item()
            torch.testing.assert_close(got[name], value, rtol=0, atol=allowed, msg=name)
            assert torch.equal(got[name], answers[0][0][name])


def steps_of_rank(sizes: tuple[tuple[int, ...], ...]) -> list[tuple[tuple[int, ...], float]]:
    own = [torch.zeros(count, 2) for count in sizes[distributed.get_rank()]]
    return [(tuple(x.shape), w) for x, w in normscope.joined(own, like=torch.zeros(9, 2))]


def test_all_ranks_have_the_same_number_of_steps_and_the_same_weights(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    sizes = ((2,), (3, 0), ())

    answers = ranks.run(3, steps_of_rank, sizes, environment=environment)

    assert [[shape for shape, _ in steps] for steps in answers] == [
        [(2, 2), (0, 2)],
        [(3, 2), (0, 2)],
        [(0, 2), (0, 2)],
    ]
    # 3 ranks and 5 samples; no rank has a sample in the second step.
    assert [[weight for _, weight in steps] for steps in answers] == [[3 / 5, 0.0]] * 3


def steps_of_ranks_without_batches() -> int:
    return len(list(normscope.joined([])))


def test_without_any_batches_there_are_no_steps(ranks: RankPool) -> None:
    assert ranks.run(3, steps_of_ranks_without_batches) == [0] * 3


def second_loop() -> list[int]:
    own = [torch.zeros(1)] * distributed.get_rank()
    return [len(list(normscope.joined(own, like=torch.zeros(1)))) for _ in range(3)]


def test_each_epoch_can_have_its_own_loop(ranks: RankPool) -> None:
    assert ranks.run(3, second_loop) == [[2, 2, 2]] * 3


def test_without_a_process_group_there_are_only_the_rank_s_own_batches() -> None:
    own = [torch.randn(4, 2), torch.randn(1, 2)]

    steps = list(normscope.joined(own))

    assert [weight for _, weight in steps] == [1 / 4, 1.0]
    assert all(got is given for (got, _), given in zip(steps, own, strict=True))


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
