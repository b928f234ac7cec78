# SPDX-License-Identifier: Apache-2.0
"""Scopes that follow what is measured while a model trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn

import normscope

EVERY = 3


def _network() -> nn.Sequential:
    """Layers with many values, with one an image, and one that is left alone."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(8),
        nn.Linear(8, 4),
        nn.BatchNorm1d(4),
    )
    normscope.convert(network, "local")
    return network


def _scopes_while_training(steps: int, state: dict[str, Any] | None = None) -> list[Any]:
    """Scopes after each step, and the state after the last."""
    rank = distributed.get_rank()
    network = _network()
    scopes = normscope.AdaptiveScope(network, 16, every=EVERY, exclude="6")
    if state is not None:
        scopes.load_state_dict(state)
    generator = torch.Generator().manual_seed(rank)
    result: list[Any] = []
    for _ in range(steps):
        network(torch.randn(4, 3, 8, 8, generator=generator)).sum().backward()
        scopes.step()
        result.append({name: str(scope) for name, scope in scopes.scopes.items()})
    assert str(network[6].scope) == "local"
    assert not network[1]._forward_pre_hooks or steps % EVERY == 0
    return [*result, scopes.state_dict()]


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_is_as_wide_as_it_must_be(ranks: RankPool, size: int) -> None:
    answers = ranks.run(size, _scopes_while_training, 2)

    assert all(answer == answers[0] for answer in answers)
    # 256 positions of noise an image are many; one value an image is not, nor are eight.
    assert answers[0][0] == {"1": "local", "4": "world"}


def test_a_restart_goes_on_where_it_was(ranks: RankPool) -> None:
    *_, state = ranks.run(2, _scopes_while_training, EVERY + 1)[0]

    answers = ranks.run(2, _scopes_while_training, 1, state)

    assert answers[0][0] == state["scopes"]
    assert answers[0][-1]["last_step"] == EVERY + 2
    assert answers[0][-1]["history"] == state["history"]


def _bytes_of_steps() -> tuple[int, int]:
    """Exchanges of a step that measures, and of one that does not."""
    network = _network()
    scopes = normscope.AdaptiveScope(network, 2, every=EVERY)
    calls = []
    for _ in range(3):
        before = normscope.communication_counters().calls
        network(torch.randn(8, 3, 8, 8)).sum().backward()
        scopes.step()
        calls.append(normscope.communication_counters().calls - before)
    return calls[0], calls[2]


def test_a_probing_step_costs_two_small_exchanges_more(ranks: RankPool) -> None:
    for probing, other in ranks.run(2, _bytes_of_steps):
        # All three layers synchronize at first, and none of them afterwards.
        assert probing == 3 * 2 + 2
        assert other == 0


def _noise_of_a_compiled_model() -> tuple[dict[str, float], dict[str, str]]:
    network = _network()
    scopes = normscope.AdaptiveScope(network, 16, every=1)
    compiled = torch.compile(network, backend="eager")
    for _ in range(2):
        compiled(torch.randn(4, 3, 8, 8)).sum().backward()
        scopes.step()
    return scopes.independent_values, {name: str(s) for name, s in scopes.scopes.items()}


def test_a_compiled_model_is_not_measured_and_stays_wide(ranks: RankPool) -> None:
    for values, scopes in ranks.run(2, _noise_of_a_compiled_model):
        assert values == {}
        assert set(scopes.values()) == {"world"}


def test_the_history_says_what_changed_when(ranks: RankPool) -> None:
    *_, state = ranks.run(2, _scopes_while_training, 2)[0]

    world = {"1": "world", "4": "world"}
    assert state["history"] == [(0, world), (1, {**world, "1": "local"})]


def test_alone_there_is_nothing_to_choose() -> None:
    network = _network()
    scopes = normscope.AdaptiveScope(network)

    network(torch.randn(8, 3, 8, 8)).sum().backward()
    scopes.step()

    assert {str(scope) for scope in scopes.scopes.values()} == {"world"}
    assert not network[1]._forward_pre_hooks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"independent_values": 1.0}, "independent_values: expected at least 2, got 1.0"),
        ({"independent_values": float("nan")}, "expected at least 2, got nan"),
        ({"every": 0}, "every: expected at least 1, got 0"),
        ({"include": "nothing"}, "include: expected patterns that match"),
    ],
)
def test_bad_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normscope.AdaptiveScope(_network(), **arguments)


def test_a_state_of_another_model_is_refused() -> None:
    scopes = normscope.AdaptiveScope(_network())

    with pytest.raises(ValueError, match="state_dict: expected scopes of 1, 4, 6, got None"):
        scopes.load_state_dict({})
