# SPDX-License-Identifier: Apache-2.0
"""tensordict: batches of its classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankPool
from tensordict import TensorClass, TensorDict
from torch import distributed

import normscope


class Images(TensorClass):  # type: ignore[misc]
    x: torch.Tensor
    name: str


def batch_of(kind: str, samples: int) -> Any:
    x = torch.ones(samples, 3)
    if kind == "class":
        return Images(x=x, name="name", batch_size=[samples])
    inner = {"inner": TensorDict({"y": x}, [samples, 3])} if kind == "nested" else {}
    return TensorDict({"x": x, **inner}, [samples])


def steps_of_rank(kind: str) -> list[tuple[tuple[int, ...], list[int], float]]:
    batches = [batch_of(kind, samples) for samples in (4, 3)[: 2 - distributed.get_rank()]]
    steps = [(tuple(b["x"].shape), [*b.batch_size], w) for b, w in normscope.joined(batches)]
    assert [len(batch["x"]) for batch in batches] == [4, 3][: len(batches)]
    return steps


@pytest.mark.parametrize("kind", ["dict", "nested"])
def test_ranks_with_fewer_batches_get_empty_ones(ranks: RankPool, kind: str) -> None:
    first = ((4, 3), [4], 2 / 8)

    assert ranks.run(2, steps_of_rank, kind) == [
        [first, ((3, 3), [3], 2 / 3)],
        [first, ((0, 3), [0], 2 / 3)],
    ]


def test_an_empty_tensorclass_is_one() -> None:
    batch = batch_of("class", 4)

    empty = normscope.training.empty_batch_like(batch)

    assert type(empty) is Images
    assert (empty.x.shape, empty.name, [*empty.batch_size]) == ((0, 3), "name", [0])
    assert [*batch.batch_size] == [4]
    assert [weight for _, weight in normscope.joined([batch])] == [1 / 4]


def test_a_batch_size_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="a TensorDict whose batch_size begins with the number of"):
        list(normscope.joined([TensorDict({"x": torch.ones(4, 3)}, [])]))
