# SPDX-License-Identifier: Apache-2.0
"""detect_non_finite: nothing is updated, and the error on all ranks names the first rank."""

from __future__ import annotations

import copy

import pytest
import torch
from rank_pool import RankPool, error_of
from torch import distributed

import normscope

BAD = [float("nan"), float("inf"), float("-inf")]


def network(scope: str) -> torch.nn.Sequential:
    return normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(2)), scope)


def with_bad(value: float) -> torch.Tensor:
    """Return an input with two non-finite values on rank 1."""
    x = torch.randn(4, 2)
    if distributed.get_rank() == 1:
        x[1:3, 0] = value
    return x


def steps(where: str, value: float, scope: str) -> tuple[str, bool, str]:
    """Return the error, whether nothing has changed, and the error of the next step."""
    net = network(scope)
    net(torch.randn(4, 2)).sum().backward()
    before = copy.deepcopy(net.state_dict())
    weight = net[0].weight
    assert isinstance(weight, torch.Tensor)
    assert weight.grad is not None
    gradient = weight.grad.clone()
    with normscope.training.detect_non_finite():
        if where == "x":
            message = error_of(lambda: net(with_bad(value)), RuntimeError)
        else:
            y = net(torch.randn(4, 2, requires_grad=True))
            before = copy.deepcopy(net.state_dict())
            message = error_of(lambda: y.backward(with_bad(value)), RuntimeError)
        is_same = all(torch.equal(v, before[name]) for name, v in net.state_dict().items())
        is_same = is_same and torch.equal(weight.grad, gradient)
        later = error_of(lambda: net(torch.randn(4, 2)).sum().backward())
    return message, is_same, later


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(("where", "direction"), [("x", "forward"), ("dy", "backward")])
def test_non_finite_values_are_named_before_they_spread(
    ranks: RankPool, environment: dict[str, str], value: float, where: str, direction: str
) -> None:
    answers = ranks.run(3, steps, where, value, "world", environment=environment)

    expected = f"{where}: expected finite values in {direction} of 0, got 2 non-finite on rank 1"
    assert answers == [(expected, True, "")] * 3


def test_ranks_of_another_group_continue(ranks: RankPool) -> None:
    answers = ranks.run(4, steps, "x", BAD[0], "group:2")

    assert ["2 non-finite on rank 1" in message for message, _, _ in answers] == [
        True,
        True,
        False,
        False,
    ]


def differentiate_twice() -> tuple[str, str]:
    net = network("world")
    x = torch.randn(4, 2, requires_grad=True)

    def step(grad_dx: torch.Tensor) -> None:
        [dx] = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        dx.backward(grad_dx)

    with normscope.training.detect_non_finite():
        message = error_of(lambda: step(with_bad(float("nan"))), RuntimeError)
        assert x.grad is None
        return message, error_of(lambda: step(torch.randn(4, 2)))


def test_a_double_backward_names_the_first_rank(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    for message, later in ranks.run(3, differentiate_twice, environment=environment):
        assert message.startswith("gradient sums: expected finite values in double backward of 0, ")
        assert message.endswith("non-finite on rank 1")
        assert "rank 0" not in message
        assert later == ""


@pytest.mark.parametrize("scope", ["local", "slices:2"])
def test_a_single_rank_raises_too(scope: str) -> None:
    net = network(scope)
    before = copy.deepcopy(net.state_dict())
    x = torch.randn(4, 2)
    x[0, 1] = float("nan")

    with (
        normscope.training.detect_non_finite(),
        pytest.raises(RuntimeError, match="got 1 non-finite"),
    ):
        net(x)

    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net(x).isnan().any()  # off again
    net.eval()
    with normscope.training.detect_non_finite():
        net(x)


def test_finite_values_are_no_error_however_large() -> None:
    with normscope.training.detect_non_finite():
        network("local")(torch.full((4, 2), 3e38))


def rank_1_does_not_look() -> str:
    net = network("world")
    with normscope.training.detect_non_finite(distributed.get_rank() != 1):
        return error_of(lambda: net(torch.randn(4, 2)))


def test_ranks_with_different_settings_raise(ranks: RankPool, environment: dict[str, str]) -> None:
    for message in ranks.run(2, rank_1_does_not_look, environment=environment):
        assert "rank 0: forward of 0, looking for non-finite values" in message
        assert "rank 1: forward of 0 (2 channels" in message
