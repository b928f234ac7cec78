# SPDX-License-Identifier: Apache-2.0
"""recommend_scopes in one process: the scopes that follow from the measurements."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path

import pytest
import torch
from masked_network import Masked
from noisy_network import BATCHES, noise_batches, small_network
from torch import nn

import normscope
from normscope.scopes import PartMoments, independent_values

EPS = 1e-5


def test_layers_with_few_values_get_wide_scopes() -> None:
    plan = normscope.recommend_scopes(
        small_network().eval(), noise_batches(16), 12, ranks=8, include="*"
    )

    assert {name: str(scope) for name, scope in plan.scopes.items()} == {"1": "local", "7": "world"}
    assert (plan.exchanges_per_step, plan.ranks, plan.batches) == (2, 8, BATCHES)
    assert [each.scope for each in plan.layers[0].candidates] == [
        "local",
        "group:2",
        "group:4",
        "world",
    ]


def test_a_plan_can_be_applied_to_a_model_and_saved_to_a_file(tmp_path: Path) -> None:
    network = small_network()
    plan = normscope.recommend_scopes(network.eval(), noise_batches(16), 12, ranks=8, include="*")

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
def test_recommending_does_not_change_the_model(call: int) -> None:
    network = small_network().train()
    network(noise_batches(4)[0])
    model = _RaisesAt(network, call)
    state = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    seen = [network[1].elements_seen, network[7].elements_seen]

    with contextlib.suppress(KeyboardInterrupt):
        normscope.recommend_scopes(model, noise_batches(8))

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert seen == [network[1].elements_seen, network[7].elements_seen]
    assert [str(network[i].scope) for i in (1, 7)] == ["local", "local"]
    assert not network[1]._forward_pre_hooks
    assert not network[1]._forward_hooks
    assert all(module.training for module in model.modules())


@pytest.mark.filterwarnings("ignore:the standard error exceeds")
def test_batches_are_requested_one_by_one() -> None:
    network = small_network()
    events: list[str] = []
    network.register_forward_hook(lambda *_: events.append("run"))

    def batches() -> Iterator[torch.Tensor]:
        for batch in noise_batches(8, count=3):
            events.append("asked")
            yield batch

    plan = normscope.recommend_scopes(network, batches(), 2)

    assert events == ["asked", "run"] * 3
    assert plan.batches == 3


class _Twice(nn.Module):
    """One layer for inputs of two sizes and means, like a head on a feature pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = normscope.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(x).mean() + self.norm(10 + x[:, :, ::4, ::4]).mean()
        return result


def test_for_a_layer_that_runs_twice_the_noisier_call_counts() -> None:
    batches = [torch.randn(8, 3, 8, 8) for _ in range(32)]

    plan = normscope.recommend_scopes(_Twice(), batches, ranks=4)

    coarse = reduce(
        PartMoments.followed_by, (PartMoments.of(10 + x[:, :, ::4, ::4], 4) for x in batches)
    )
    assert plan.layers[0].candidates[0].values == independent_values(coarse, EPS)
    # Each part has 2 images of 2 x 2 positions.
    assert plan.layers[0].candidates[0].values is not None
    assert plan.layers[0].candidates[0].values.value == pytest.approx(8, rel=0.3)


class _Routed(nn.Module):
    """Uses another layer for every second batch; a third layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.never = (normscope.BatchNorm1d(4) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = (self.odd if self.calls % 2 else self.even)(x)
        return result


@pytest.mark.filterwarnings("ignore:the standard error exceeds")
def test_a_layer_is_measured_on_the_batches_that_reach_it() -> None:
    batches = [torch.randn(8, 4) for _ in range(6)]

    plan = normscope.recommend_scopes(_Routed(), batches, 2, ranks=2)

    odd = reduce(PartMoments.followed_by, (PartMoments.of(x, 2) for x in batches[::2]))
    values = {layer.layer: layer.candidates[0].values for layer in plan.layers}
    assert set(values) == {"even", "odd"}
    assert values["odd"] == independent_values(odd, EPS)


class _CountsAnew(nn.Module):
    """A module that replaces its buffer by a new tensor."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x


def test_buffers_that_a_module_replaces_are_restored() -> None:
    network = nn.Sequential(_CountsAnew(), normscope.BatchNorm1d(3))
    count = network[0].count

    normscope.recommend_scopes(network, [torch.randn(64, 3)] * 2, 2)

    assert network[0].count is count
    assert count == 0


def test_a_lazy_model_without_shapes_is_refused() -> None:
    network = nn.Sequential(nn.LazyLinear(3), normscope.BatchNorm1d(3))

    with pytest.raises(ValueError, match=r"expected one that knows its shapes, got 0\.weight"):
        normscope.recommend_scopes(network, [torch.randn(4, 3)])


def test_layers_for_which_world_is_not_enough_cause_a_warning() -> None:
    with pytest.warns(UserWarning, match="not even world is worth 1000 independent values in 1, 7"):
        plan = normscope.recommend_scopes(
            small_network().eval(), noise_batches(8), 1000, ranks=2, include="*"
        )

    assert [str(scope) for scope in plan.scopes.values()] == ["world", "world"]
    assert str(plan).count("not reached") == 2


def test_heavy_tails_cause_a_warning() -> None:
    layer = normscope.BatchNorm1d(1)
    batches = [torch.randn(8, 1).mul(3).exp() for _ in range(4)]

    with pytest.warns(UserWarning, match="the standard error exceeds 25% in model: more batches"):
        plan = normscope.recommend_scopes(layer, batches, 2, ranks=2)

    assert "uncertain" in str(plan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normscope.recommend_scopes(small_network(), []), "batches: expected at least one"),
        (
            lambda: normscope.recommend_scopes(nn.ReLU(), noise_batches(2)),
            "expected layers of normscope",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), noise_batches(2), 1.9),
            "at least 2, got 1.9",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), noise_batches(2), math.nan),
            "2, got nan",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), noise_batches(2), ranks=0),
            "at least 1, got 0",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), noise_batches(2), ranks=3),
            "expected at least 3 samples, one for each rank, got 2 in 1",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), noise_batches(1)),
            "more than 1 value per channel",
        ),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.filterwarnings("ignore:the standard error exceeds")
def test_only_the_unmasked_values_of_a_layer_are_measured() -> None:
    clean = [(torch.randn(6, 3, 5, 4) + 2, torch.rand(6, 1, 5, 4) > 0.5) for _ in range(3)]
    batches = [(torch.where(mask, x, torch.tensor(math.nan)), mask) for x, mask in clean]
    model = Masked(normscope.BatchNorm2d(3, scope="local"))

    by_name, on_clean, by_position = (
        normscope.recommend_scopes(net, given, ranks=2).layers[0].candidates
        for net, given in ((model, batches), (model, clean), (model.layer, batches))
    )

    assert by_name == on_clean == by_position
