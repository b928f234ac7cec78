# SPDX-License-Identifier: Apache-2.0
"""recommend_scopes in one process: the scopes that follow from what it measures."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from noisy_network import BATCHES, UPDATES, noise_batches, small_network, trained
from torch import nn

import normscope
from normscope.scopes import ScopePlan


def test_layers_with_few_values_get_world() -> None:
    plan = normscope.recommend_scopes(
        small_network().eval(), noise_batches(16), 1, ranks=8, include="*"
    )

    assert {name: str(scope) for name, scope in plan.scopes.items()} == {"1": "local", "7": "world"}
    assert (plan.exchanges_per_step, plan.ranks, plan.batches) == (2, 8, BATCHES)
    assert plan.updates == UPDATES
    assert [each.scope for each in plan.layers[0].candidates] == ["local", "world"]
    # Two images with 64 positions each, or with one.
    assert [layer.candidates[0].elements for layer in plan.layers] == [128, 2]
    assert plan.noise == pytest.approx(plan.layers[0].candidates[0].noise)


def test_more_noise_is_allowed_to_fewer_exchanges() -> None:
    model = trained(nn.Sequential(*(normscope.BatchNorm2d(3) for _ in range(4))))
    batches = [torch.randn(8, 3, 8, 8) + torch.randn(8, 3, 1, 1) for _ in range(8)]

    plans = [
        normscope.recommend_scopes(model, batches, noise, ranks=4)
        for noise in (0, 0.1, 0.5, math.inf)
    ]

    assert plans[0].exchanges_per_step == 8
    assert plans[-1].exchanges_per_step == 0
    exchanges = [plan.exchanges_per_step for plan in plans]
    assert exchanges == sorted(exchanges, reverse=True)
    assert all(plan.noise <= plan.allowed for plan in plans)


def test_a_single_image_is_never_normalized_alone() -> None:
    """As instance normalization, whose evaluation would be another function."""
    model = trained(nn.Sequential(normscope.BatchNorm2d(3), nn.Conv2d(3, 2, 3)))

    plan = normscope.recommend_scopes(model, noise_batches(4), math.inf, ranks=4)

    assert [str(scope) for scope in plan.scopes.values()] == ["world"]
    assert plan.layers[0].candidates[0].samples == 1


@pytest.mark.filterwarnings("default")
def test_layers_that_have_not_trained_get_world() -> None:
    model = nn.Sequential(normscope.BatchNorm2d(3), normscope.BatchNorm2d(3))
    trained(model[1])

    with pytest.warns(UserWarning, match=r"1 of 2 layers have had fewer than 50 training steps"):
        plan = normscope.recommend_scopes(model, noise_batches(8), math.inf, ranks=4)

    assert [str(scope) for scope in plan.scopes.values()] == ["world", "local"]
    assert "1 of 2 layers have had fewer than 50 training steps, and get world (0, ...)" in str(
        plan
    )


def test_the_plan_says_where_nearly_every_layer_needs_world() -> None:
    model = trained(nn.Sequential(normscope.BatchNorm2d(3), normscope.BatchNorm2d(3)))

    all_world, none = (
        str(normscope.recommend_scopes(model, noise_batches(8), noise, ranks=4))
        for noise in (0, math.inf)
    )

    assert "Nearly every layer needs world" in all_world
    assert "Nearly every layer needs world" not in none
    assert "Measured after 100 steps" in all_world


@pytest.mark.filterwarnings("ignore:.*fewer than 50 training steps")
def test_a_plan_of_untrained_layers_does_not_say_that_they_need_world() -> None:
    plan = normscope.recommend_scopes(normscope.BatchNorm2d(3), noise_batches(8), 1.0, ranks=4)

    assert plan.noise_of_local < plan.allowed
    assert "Nearly every layer needs world" not in str(plan)


def test_norm_batches_that_are_small_even_in_world_cause_a_warning() -> None:
    model = trained(normscope.BatchNorm1d(4))

    with pytest.warns(UserWarning, match="even world has fewer than 8 elements .* in model: more"):
        normscope.recommend_scopes(model, [torch.randn(4, 4)] * 4, ranks=2)


def test_a_single_batch_causes_a_warning() -> None:
    with pytest.warns(UserWarning, match="a single batch does not tell the error of the noise"):
        normscope.recommend_scopes(small_network(), noise_batches(16, count=1), ranks=4)


def test_a_plan_can_be_applied_to_a_model_and_saved_to_a_file(tmp_path: Path) -> None:
    network = small_network()
    plan = normscope.recommend_scopes(network.eval(), noise_batches(16), 1, ranks=8, include="*")
    plan = dataclasses.replace(plan, standard_error=0)  # an int in the file

    plan.save(tmp_path / "plan.json")
    loaded = ScopePlan.load(tmp_path / "plan.json")
    loaded.apply(network)

    assert loaded == plan
    assert (str(network[1].scope), str(network[7].scope)) == ("local", "world")
    assert "world in every layer: 4" in str(plan)


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
    network(noise_batches(4)[0]).sum().backward()
    model = _RaisesAt(network, call)
    state = copy.deepcopy(model.state_dict())
    gradients = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    rng = torch.get_rng_state()
    seen = [network[1].elements_seen, network[7].elements_seen]

    with contextlib.suppress(KeyboardInterrupt), torch.no_grad():
        normscope.recommend_scopes(model, noise_batches(8))

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), rng)
    assert seen == [network[1].elements_seen, network[7].elements_seen]
    assert [str(network[i].scope) for i in (1, 7)] == ["local", "local"]
    assert not network[1]._forward_pre_hooks
    assert not network[1]._forward_hooks
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_does_not_depend_on_the_mode_around_it(mode: Callable[[], Any]) -> None:
    model, batches = small_network().train(), noise_batches(8)
    expected = normscope.recommend_scopes(model, batches)

    with mode():
        plan = normscope.recommend_scopes(model, batches)

    assert plan == expected


def test_batches_are_requested_one_by_one() -> None:
    network = small_network()
    events: list[str] = []
    network.register_forward_hook(lambda *_: events.append("run"))

    def batches() -> Iterator[torch.Tensor]:
        for batch in noise_batches(8, count=3):
            events.append("asked")
            yield batch

    plan = normscope.recommend_scopes(network, batches())

    assert events == ["asked", "run"] * 3
    assert plan.batches == 3


def test_a_terminal_shows_a_bar_if_tqdm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = normscope.recommend_scopes(small_network(), noise_batches(8, count=3))
    shown: list[object] = []

    def bar(batches: Iterator[object], *_: object, total: int, **__: object) -> Iterator[object]:
        for batch in batches:
            yield batch
            shown.append(total)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for tqdm in (SimpleNamespace(tqdm=bar), None):
        monkeypatch.setitem(sys.modules, "tqdm", tqdm)
        assert normscope.recommend_scopes(small_network(), noise_batches(8, count=3)) == expected

    assert shown == [3, 3, 3]


class _CountsAnew(nn.Module):
    """A module that replaces a buffer by a new tensor, and resizes another."""

    count: torch.Tensor
    ones: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ones", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        self.ones.resize_(len(x)).fill_(1)
        return x


def test_buffers_that_a_module_replaces_or_resizes_are_restored() -> None:
    network = trained(nn.Sequential(_CountsAnew(), normscope.BatchNorm1d(3)))
    count = network[0].count

    normscope.recommend_scopes(network, [torch.randn(64, 3)] * 2)

    assert network[0].count is count
    assert count == 0
    assert network[0].ones.shape == (0,)
