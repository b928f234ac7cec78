# SPDX-License-Identifier: Apache-2.0
"""Models whose layers have equal names never exchange each other's statistics in silence."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool, error_of
from torch import distributed, nn

import normscope

Pair = tuple[nn.Module, nn.Module]


def network() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def converted(scope: str = "world") -> nn.Module:
    return normscope.convert(network(), scope)


def two_conversions() -> Pair:
    return converted(), converted()


def a_deepcopy() -> Pair:
    student = converted()
    return student, copy.deepcopy(student)


def unpickled() -> Pair:
    file = io.BytesIO()
    torch.save(two_conversions(), file)
    file.seek(0)
    pair: Pair = torch.load(file, weights_only=False)
    return pair


def layers_by_hand() -> Pair:
    pair = normscope.BatchNorm1d(4), normscope.BatchNorm1d(4)
    for layer in pair:
        layer.layer_name = "stem"
    return pair


PAIRS: dict[str, Callable[[], Pair]] = {
    pair.__name__: pair for pair in (two_conversions, a_deepcopy, unpickled, layers_by_hand)
}


def step(models: Pair) -> None:
    for model in models:
        model(torch.randn(2, 4)).sum().backward()


def rank_1_changes_the_order(pair: str, steps_before: int) -> str:
    first, second = PAIRS[pair]()
    for _ in range(steps_before):
        step((first, second))
    order = (second, first) if distributed.get_rank() == 1 else (first, second)
    return error_of(lambda: step(order))


@pytest.mark.parametrize("pair", PAIRS)
def test_another_order_of_models_is_told(
    ranks: RankPool, environment: dict[str, str], pair: str
) -> None:
    messages = ranks.run(2, rank_1_changes_the_order, pair, 1, environment=environment)

    name = "stem" if pair == "layers_by_hand" else "0"
    for message in messages:
        assert f"rank 0: forward of {name} (4 channels" in message
        assert f"rank 1: forward of {name} of model 2 (4 channels" in message


@pytest.mark.parametrize("pair", PAIRS)
def test_another_order_in_the_first_step_is_told_at_the_second_model(
    ranks: RankPool, environment: dict[str, str], pair: str
) -> None:
    messages = ranks.run(2, rank_1_changes_the_order, pair, 0, environment=environment)

    for message in messages:
        assert "of model 2 (4 channels" in message
        assert "of model 2, made before model 1 (4 channels" in message


def statistics(*models: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for model in models for buffer in model.buffers()]


def rank_0_has_further_models() -> list[torch.Tensor]:
    """Train two models with equal names; rank 0 also has models that it evaluates or keeps."""
    kept: list[nn.Module] = []

    def keep(make: Callable[[], nn.Module]) -> None:
        if distributed.get_rank() == 0:
            kept.append(make().eval())
            kept[-1](torch.randn(2, 4))

    keep(converted)
    student = converted()
    keep(lambda: copy.deepcopy(student))
    teacher = copy.deepcopy(student)
    keep(lambda: copy.deepcopy(teacher))
    keep(converted)
    later = converted("group:2")
    for _ in range(2):
        step((student, teacher))
        keep(lambda: copy.deepcopy(student))
        step((later, student))
    normscope.set_scope(teacher, "group:2")
    step((student, teacher))
    if distributed.get_rank() == 0:  # without peers
        alone = copy.deepcopy(student)
        normscope.set_scope(alone, "local")
        step((alone, alone))
    step((teacher, later))
    return statistics(student, teacher, later)


def test_models_that_only_rank_0_has_change_nothing(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    first, second = ranks.run(2, rank_0_has_further_models, environment=environment)

    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def names_of_copies(number: int) -> int:
    """Train copies one after the other, and return under how many names."""
    model, names = converted(), set()
    for _ in range(number):
        copy.deepcopy(model)(torch.randn(2, 4)).sum().backward()
        names.update(re.findall(r"backward of (.*?), ", normscope.status()))
    return len(names)


def test_copies_without_end_do_not_get_names_without_end(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    assert max(ranks.run(2, names_of_copies, 40, environment=environment)) < 20
