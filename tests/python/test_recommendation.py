# SPDX-License-Identifier: Apache-2.0
"""Which layers need which scope: what is measured, and what follows from it."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn

import normscope
from normscope.independent_values import PartMoments, independent_values

EPS = 1e-5
BATCHES = 8


def _values(make: Callable[[], torch.Tensor], parts: int, batches: int = BATCHES) -> float:
    """Mean of many estimates, each of some batches."""
    estimates = []
    for _ in range(20):
        moments = PartMoments.of(make(), parts)
        for _ in range(batches - 1):
            moments = moments.followed_by(PartMoments.of(make(), parts))
        values = independent_values(moments, EPS)
        assert values is not None
        estimates.append(values.value)
    return sum(estimates) / len(estimates)


# The mean of 20 estimates, each from 64 channels, 4 parts and 8 batches, is known to a percent or
# two; the estimator's bias is of the order of one part in 32.
@pytest.mark.parametrize("values", [2, 4, 16])
def test_independent_normal_values_are_counted(values: int) -> None:
    torch.manual_seed(0)

    worth = _values(lambda: 3 + 2 * torch.randn(4 * values, 64), parts=4)

    assert worth == pytest.approx(values, rel=0.06)


def test_values_that_are_repeated_count_once() -> None:
    torch.manual_seed(0)

    worth = _values(lambda: torch.randn(16, 64, 1).expand(-1, -1, 9), parts=4)

    assert worth == pytest.approx(4, rel=0.06)


def test_images_with_a_constant_of_their_own_are_worth_few_values() -> None:
    torch.manual_seed(0)

    # Half of the variance is the image's own: the other half of 100 positions is as good as known.
    # q / V has the variance 2 (1/2)^2 / n for n images.
    worth = _values(lambda: torch.randn(16, 64, 1) + torch.randn(16, 64, 100), parts=4)

    assert worth == pytest.approx(16, rel=0.1)


def test_a_wider_part_is_worth_as_much_more() -> None:
    torch.manual_seed(0)
    moments = PartMoments.of(torch.randn(32 * 8, 256), 64)

    one, four = (independent_values(moments, EPS, size) for size in (1, 4))

    assert one is not None
    assert four is not None
    assert four.value / one.value == pytest.approx(4, rel=0.15)


def test_uneven_and_empty_parts_count_by_their_size() -> None:
    torch.manual_seed(0)
    sizes = [2, 6, 0, 8]
    estimates = []
    for _ in range(40):
        rows = []
        for _ in range(BATCHES):
            of_parts = [PartMoments.of(torch.randn(size, 64)) for size in sizes]
            rows.append(reduce(PartMoments.beside, of_parts))
        moments = rows[0]
        for row in rows[1:]:
            moments = moments.followed_by(row)
        values = independent_values(moments, EPS)
        assert values is not None
        estimates.append(values.value)

    # 16 values in three parts.
    assert sum(estimates) / len(estimates) == pytest.approx(16 / 3, rel=0.08)


def test_a_channel_without_variance_says_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 2)

    with_constant = independent_values(PartMoments.of(torch.cat([x, torch.ones(16, 1)], 1), 4), EPS)
    constant = independent_values(PartMoments.of(torch.ones(16, 1), 4), EPS)

    without_constant = independent_values(PartMoments.of(x, 4), EPS)

    assert with_constant is not None
    assert without_constant is not None
    assert constant is not None
    assert math.isclose(with_constant.value, without_constant.value)
    assert math.isinf(constant.value)


def _network() -> nn.Sequential:
    """The first layer normalizes 64 positions of noise an image, the last one value."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
    )
    normscope.convert(network, "local")
    return network


def _batches(samples: int, count: int = BATCHES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 3, 8, 8, generator=generator) for _ in range(count)]


def test_layers_with_few_values_get_wide_scopes() -> None:
    plan = normscope.recommend_scopes(_network().eval(), _batches(16), 12, ranks=8)

    assert {name: str(scope) for name, scope in plan.scopes.items()} == {"1": "local", "7": "world"}
    assert (plan.exchanges_per_step, plan.ranks, plan.batches) == (2, 8, BATCHES)
    assert [each.scope for each in plan.layers[0].candidates] == [
        "local",
        "group:2",
        "group:4",
        "world",
    ]


def test_a_plan_gives_its_scopes_to_a_model_and_to_a_file(tmp_path: Path) -> None:
    network = _network()
    plan = normscope.recommend_scopes(network.eval(), _batches(16), 12, ranks=8)

    plan.save(tmp_path / "plan.json")
    loaded = normscope.ScopePlan.load(tmp_path / "plan.json")
    loaded.apply(network)

    assert loaded == plan
    assert (str(network[1].scope), str(network[7].scope)) == ("local", "world")
    assert "world in every layer: 4" in str(plan)
    with pytest.raises(ValueError, match="expected layers of normscope called 1, 7, got none"):
        plan.apply(nn.Linear(2, 2))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a plan of recommend_scopes"):
        normscope.ScopePlan.load(tmp_path / "plan.json")


class _RaisesAt(nn.Module):
    def __init__(self, network: nn.Module, call: int) -> None:
        super().__init__()
        self.network, self.left = network, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        result: torch.Tensor = self.network(x)
        return result


@pytest.mark.parametrize("call", [0, 3], ids=["done", "interrupted"])
def test_recommending_leaves_the_model_as_it_was(call: int) -> None:
    network = _network().train()
    network(_batches(4)[0])
    model = _RaisesAt(network, call)
    state = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    seen = [network[1].elements_seen, network[7].elements_seen]

    with contextlib.suppress(KeyboardInterrupt):
        normscope.recommend_scopes(model, _batches(8))

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert seen == [network[1].elements_seen, network[7].elements_seen]
    assert [str(network[i].scope) for i in (1, 7)] == ["local", "local"]
    assert not network[1]._forward_pre_hooks
    assert not network[1]._forward_hooks
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_plan_of_slices(ranks: RankPool, size: int) -> None:
    plans = ranks.run(size, _plan_of_rank)
    alone = normscope.recommend_scopes(_network().eval(), _batches(12), 12, ranks=size)

    assert all(plan == plans[0] for plan in plans)
    for of_ranks, of_slices in zip(plans[0].layers, alone.layers, strict=True):
        assert of_ranks.scope == of_slices.scope
        for one, other in zip(of_ranks.candidates, of_slices.candidates, strict=True):
            assert one.values is not None
            assert other.values is not None
            # Layers' inputs are float32, and depend on how a batch is cut in their last bits.
            assert one.values.value == pytest.approx(other.values.value, rel=1e-4)
    assert plans[0].layers[0].exchange_seconds is not None


def _plan_of_rank() -> normscope.ScopePlan:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    shares = [batch.chunk(size)[rank] for batch in _batches(12)]
    return normscope.recommend_scopes(_network().eval(), shares, 12)


def test_a_group_that_a_host_holds_is_called_node(ranks: RankPool) -> None:
    for scopes in ranks.run(4, _scopes_on_two_hosts):
        assert scopes == ["local", "node", "world"]


def _scopes_on_two_hosts() -> list[str]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NORMSCOPE_NODE", f"host {distributed.get_rank() // 2}")
        plan = normscope.recommend_scopes(_network().eval(), _batches(4))
    return [candidate.scope for candidate in plan.layers[0].candidates]


def test_a_plan_of_ranks_saves_exchanges(ranks: RankPool) -> None:
    for sent, planned in ranks.run(2, _bytes_of_step):
        assert sent == planned


def _bytes_of_step() -> tuple[int, int]:
    """What a step under the plan sends, and what the plan says."""
    rank = distributed.get_rank()
    network = _network()
    shares = [batch.chunk(2)[rank] for batch in _batches(32)]
    plan = normscope.recommend_scopes(network, shares, 24)
    plan.apply(network)
    network(shares[0])  # the ranks agree on scopes at first use
    before = normscope.communication_counters().bytes
    network(shares[0]).sum().backward()
    assert plan.exchanges_per_step == 2
    return normscope.communication_counters().bytes - before, plan.bytes_per_step


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_other_numbers_of_batches_are_told(ranks: RankPool) -> None:
    for error in ranks.run(3, _error_with_uneven_batches):
        assert error == (
            "ValueError: batches: expected the same number on every rank, since layers "
            "synchronize, got [1, 2, 3]"
        )


def _error_with_uneven_batches() -> str:
    batches = _batches(4, count=1 + distributed.get_rank())
    return _error_of(lambda: normscope.recommend_scopes(_network(), batches))


def test_a_rank_that_fails_ends_the_wait_of_the_others(ranks: RankPool) -> None:
    one, other = ranks.run(2, _error_of_a_failing_rank)

    assert "mat1 and mat2" in one
    assert "rank 0" in other


def _error_of_a_failing_rank() -> str:
    torch.manual_seed(0)
    network = normscope.convert(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    width = 4 if distributed.get_rank() == 0 else 3
    return _error_of(lambda: normscope.recommend_scopes(network, [torch.randn(4, width)]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normscope.recommend_scopes(_network(), []), "batches: expected at least one"),
        (
            lambda: normscope.recommend_scopes(nn.ReLU(), _batches(2)),
            "expected layers of normscope",
        ),
        (lambda: normscope.recommend_scopes(_network(), _batches(2), 1.9), "at least 2, got 1.9"),
        (lambda: normscope.recommend_scopes(_network(), _batches(2), math.nan), "2, got nan"),
        (lambda: normscope.recommend_scopes(_network(), _batches(2), ranks=0), "at least 1, got 0"),
        (
            lambda: normscope.recommend_scopes(_network(), _batches(2), ranks=3),
            "expected at least 3 samples, one for each rank, got 2 in 1",
        ),
        (
            lambda: normscope.recommend_scopes(_network(), _batches(1)),
            "more than 1 value per channel",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
