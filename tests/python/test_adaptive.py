# SPDX-License-Identifier: Apache-2.0
"""AdaptiveScope: scopes that follow measurements during training."""

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
    """Return a network with a layer of many values, one of one value per image, and one to skip."""
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
    """Return the scopes after each step, and the state after the last step."""
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
def test_a_layer_gets_the_scope_that_it_needs(ranks: RankPool, size: int) -> None:
    answers = ranks.run(size, _scopes_while_training, 2)

    assert all(answer == answers[0] for answer in answers)
    # 256 positions of noise per image are enough; one value per image is not, even for 8 images.
    assert answers[0][0] == {"1": "local", "4": "world"}


def test_a_restart_continues_from_its_state(ranks: RankPool) -> None:
    *_, state = ranks.run(2, _scopes_while_training, EVERY + 1)[0]

    answers = ranks.run(2, _scopes_while_training, 1, state)

    assert answers[0][0] == state["scopes"]
    assert answers[0][-1]["last_step"] == EVERY + 2
    assert answers[0][-1]["history"] == state["history"]


def _bytes_of_steps() -> tuple[int, int]:
    """Return the number of exchanges in a step that measures, and in one that does not."""
    network = _network()
    scopes = normscope.AdaptiveScope(network, 2, every=EVERY)
    calls = []
    for _ in range(3):
        before = normscope.communication_counters().calls
        network(torch.randn(8, 3, 8, 8)).sum().backward()
        scopes.step()
        calls.append(normscope.communication_counters().calls - before)
    return calls[0], calls[2]


def test_a_measurement_costs_two_small_exchanges(ranks: RankPool) -> None:
    for probing, other in ranks.run(2, _bytes_of_steps):
        # All three layers synchronize in the first step, and none of them afterwards.
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


def test_a_compiled_model_is_not_measured_and_keeps_world(ranks: RankPool) -> None:
    for values, scopes in ranks.run(2, _noise_of_a_compiled_model):
        assert values == {}
        assert set(scopes.values()) == {"world"}


def test_the_history_records_each_change(ranks: RankPool) -> None:
    *_, state = ranks.run(2, _scopes_while_training, 2)[0]

    world = {"1": "world", "4": "world"}
    assert state["history"] == [(0, world), (1, {**world, "1": "local"})]


def _scopes_where_one_rank_chooses_otherwise() -> dict[str, str]:
    """Round the last rank's numbers so that it would choose a narrower scope."""
    network = _network()
    torch.manual_seed(distributed.get_rank())
    scopes = normscope.AdaptiveScope(network, 16, every=1)
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == distributed.get_world_size() - 1:
            patch.setattr(scopes, "_choice", lambda *_: 1)
        network(torch.randn(4, 3, 8, 8)).sum().backward()
        scopes.step()
    return {name: str(scope) for name, scope in scopes.scopes.items()}


def test_ranks_that_would_choose_differently_follow_rank_0(ranks: RankPool) -> None:
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


def test_a_restart_with_another_number_of_ranks_starts_with_world(ranks: RankPool) -> None:
    *_, state = ranks.run(4, _scopes_while_training, 1)[0]
    assert state["scopes"]["1"] == "local"
    state["scopes"]["1"] = "group:4"  # impossible with two ranks

    for scopes in ranks.run(2, _scopes_after_a_restart_among_others, state):
        assert scopes == {"1": "world", "4": "world"}


def _layers_measured(inputs: str) -> list[dict[str, float]]:
    """Return the independent values after a step with the given inputs, and after another one."""
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
def test_inputs_that_cannot_be_measured_change_nothing(ranks: RankPool, inputs: str) -> None:
    for first, second in ranks.run(2, _layers_measured, inputs):
        assert first == {}
        assert set(second) == {"1", "4", "6"}


@pytest.mark.parametrize("inputs", ["bfloat16", "channels_last"])
def test_inputs_of_any_type_and_layout_are_measured(ranks: RankPool, inputs: str) -> None:
    plain = ranks.run(2, _layers_measured, "plain")[0]

    for answer in ranks.run(2, _layers_measured, inputs):
        for values, expected in zip(answer, plain, strict=True):
            # In bfloat16, inputs and weights have only 8 bits.
            assert values == pytest.approx(expected, rel=0.1 if inputs == "bfloat16" else 1e-4)


class _Twice(nn.Module):
    """One layer for inputs of two sizes, like a head on a feature pyramid."""

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


def test_for_a_layer_that_runs_twice_the_smaller_call_counts(ranks: RankPool) -> None:
    one, other = ranks.run(2, _values_of_a_layer_that_runs_twice)

    assert one == other
    # The smaller call has 8 images of 2 x 2 positions, the larger one 512 elements. With two ranks
    # and three channels the estimate is rough.
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
    """Return the values of a model whose copies ran in the measuring step, and of one without."""
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


def test_copies_of_a_model_are_not_measured(ranks: RankPool) -> None:
    for with_copies, alone in ranks.run(2, _values_with_copies):
        assert with_copies == alone


def _error_of_a_refused_input() -> str:
    """Return the error of a rank whose layer refuses its input in a measuring step."""
    network = nn.Sequential(normscope.BatchNorm1d(3))
    scopes = normscope.AdaptiveScope(network, every=1)
    x = torch.randn(4) if distributed.get_rank() == 0 else torch.randn(4, 3)
    try:
        network(x).sum().backward()
        scopes.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_input_that_a_layer_refuses_raises_the_layer_s_error(ranks: RankPool) -> None:
    one, other = ranks.run(2, _error_of_a_refused_input)

    assert one.startswith("ValueError: x: expected at least 2 dimensions, got 1")
    assert "rank 0" in other


def test_a_single_process_has_nothing_to_choose() -> None:
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
