# SPDX-License-Identifier: Apache-2.0
"""Scopes that follow what is measured while a model trains."""

from __future__ import annotations

import copy
import pickle
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


def _scopes_where_one_rank_chooses_otherwise() -> dict[str, str]:
    """The last rank's numbers are rounded so that it would choose a narrower scope."""
    network = _network()
    torch.manual_seed(distributed.get_rank())
    scopes = normscope.AdaptiveScope(network, 16, every=1)
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == distributed.get_world_size() - 1:
            patch.setattr(scopes, "_choice", lambda *_: 1)
        network(torch.randn(4, 3, 8, 8)).sum().backward()
        scopes.step()
    return {name: str(scope) for name, scope in scopes.scopes.items()}


def test_ranks_that_would_choose_apart_follow_rank_0(ranks: RankPool) -> None:
    for scopes in ranks.run(2, _scopes_where_one_rank_chooses_otherwise):
        assert scopes == {"1": "local", "4": "world", "6": "world"}


def _scopes_after_a_restart_among_others(state: dict[str, Any]) -> dict[str, str]:
    network = _network()
    scopes = normscope.AdaptiveScope(network, 16, every=EVERY, exclude="6")
    scopes.load_state_dict(state)
    before = {name: str(scope) for name, scope in scopes.scopes.items()}
    for _ in range(EVERY):
        network(torch.randn(4, 3, 8, 8)).sum().backward()
        scopes.step()
    return before


def test_a_restart_among_other_ranks_begins_with_world(ranks: RankPool) -> None:
    *_, state = ranks.run(4, _scopes_while_training, 1)[0]
    assert state["scopes"]["1"] == "local"
    state["scopes"]["1"] = "group:4"  # what two ranks do not have

    for scopes in ranks.run(2, _scopes_after_a_restart_among_others, state):
        assert scopes == {"1": "world", "4": "world"}


def _layers_measured(inputs: str) -> list[dict[str, float]]:
    """Independent values after a first step with such inputs, and after one more."""
    rank = distributed.get_rank()
    network = _network()
    scopes = normscope.AdaptiveScope(network, 16, every=1)
    result = []
    for step in range(2):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        if step == 0 and rank == 1:
            if inputs == "empty":
                x = x[:0]
            elif inputs == "nan":
                x[0, 0, 0, 0] = torch.nan
        if inputs == "bfloat16":
            network.to(torch.bfloat16)
            x = x.to(torch.bfloat16)
        if inputs == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        network(x).sum().backward()
        scopes.step()
        result.append(scopes.independent_values)
    return result


@pytest.mark.parametrize("inputs", ["empty", "nan"])
def test_a_step_that_says_nothing_changes_nothing(ranks: RankPool, inputs: str) -> None:
    for first, second in ranks.run(2, _layers_measured, inputs):
        assert first == {}
        assert set(second) == {"1", "4", "6"}


@pytest.mark.parametrize("inputs", ["bfloat16", "channels_last"])
def test_inputs_of_any_type_and_layout_are_measured(ranks: RankPool, inputs: str) -> None:
    plain = ranks.run(2, _layers_measured, "plain")[0]

    for answer in ranks.run(2, _layers_measured, inputs):
        for values, expected in zip(answer, plain, strict=True):
            # bfloat16 keeps 8 bits of the inputs and of the weights.
            assert values == pytest.approx(expected, rel=0.1 if inputs == "bfloat16" else 1e-4)


class _Twice(nn.Module):
    """One layer for inputs of two sizes, as in heads over a pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = normscope.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x[:, :, ::4, ::4]).sum() + self.norm(x).sum()
        return result


def _values_of_a_layer_that_runs_twice() -> float:
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    model = _Twice()
    scopes = normscope.AdaptiveScope(model, every=1)
    for _ in range(8):
        model(torch.randn(8, 3, 8, 8)).backward()
        scopes.step()
    return scopes.independent_values["norm"]


def test_a_layer_that_runs_twice_is_judged_by_the_smaller_call(ranks: RankPool) -> None:
    one, other = ranks.run(2, _values_of_a_layer_that_runs_twice)

    assert one == other
    # 8 images of 2 x 2 positions; the larger call has 512. Two ranks and three channels say little.
    assert 10 < one < 100


def _scopes_of_a_parallel_model() -> dict[str, str]:
    model = nn.parallel.DistributedDataParallel(_network())
    torch.manual_seed(distributed.get_rank())
    scopes = normscope.AdaptiveScope(model.module, 16, every=1)
    for _ in range(2):
        model(torch.randn(4, 3, 8, 8)).sum().backward()
        scopes.step()
    return {name: str(scope) for name, scope in scopes.scopes.items()}


def test_a_parallel_model_is_measured(ranks: RankPool) -> None:
    for scopes in ranks.run(2, _scopes_of_a_parallel_model):
        assert scopes == {"1": "local", "4": "world", "6": "world"}


def _values_with_copies() -> tuple[dict[str, float], dict[str, float]]:
    """Of a model of which a copy and a file ran in the probing step, and of one alone."""
    result = []
    for copies in (True, False):
        torch.manual_seed(distributed.get_rank())
        x = torch.randn(4, 3, 8, 8)
        network = _network()
        scopes = normscope.AdaptiveScope(network, 16, every=1)
        network(x).sum().backward()
        for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))) * copies:
            other(x[:2]).sum().backward()
        scopes.step()
        result.append(scopes.independent_values)
    return result[0], result[1]


def test_copies_of_a_model_are_not_looked_at(ranks: RankPool) -> None:
    for with_copies, alone in ranks.run(2, _values_with_copies):
        assert with_copies == alone


def _error_of_a_refused_input() -> str:
    """Of a rank whose layer has an input that it refuses, in a probing step."""
    network = nn.Sequential(normscope.BatchNorm1d(3))
    scopes = normscope.AdaptiveScope(network, every=1)
    x = torch.randn(4) if distributed.get_rank() == 0 else torch.randn(4, 3)
    try:
        network(x).sum().backward()
        scopes.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_input_that_a_layer_refuses_is_the_layers_to_speak_of(ranks: RankPool) -> None:
    one, other = ranks.run(2, _error_of_a_refused_input)

    assert one.startswith("ValueError: x: expected at least 2 dimensions, got 1")
    assert "rank 0" in other


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
