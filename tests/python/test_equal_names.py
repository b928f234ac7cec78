# SPDX-License-Identifier: Apache-2.0
"""Models whose layers have equal names; test_faults.py has those in different orders."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import torch
from rank_pool import RankPool
from torch import distributed, nn

import normscope


def network() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def converted(scope: str = "world") -> nn.Module:
    return normscope.convert(network(), scope)


def step(models: tuple[nn.Module, ...]) -> None:
    for model in models:
        model(torch.randn(2, 4)).sum().backward()


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
