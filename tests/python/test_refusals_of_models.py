# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of functions of whole models: errors say what was expected and given."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from noisy_network import noise_batches, small_network
from torch import fx, nn

import normscope
from normscope.costs import Costs, measure
from normscope.costs.model import exchange_seconds


class Detached(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def two_layers() -> nn.Sequential:
    first = nn.Sequential(nn.Linear(3, 3), normscope.BatchNorm1d(3))
    return nn.Sequential(first, nn.BatchNorm1d(3), normscope.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normscope.recommend_scopes(small_network(), []), "batches: expected at least one"),
        (
            lambda: normscope.recommend_scopes(nn.ReLU(), noise_batches(2)),
            "expected layers of normscope",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), noise_batches(2), -0.1),
            "noise: expected at least 0, got -0.1",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), noise_batches(2), math.nan),
            "noise: expected at least 0, got nan",
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
        (
            lambda: normscope.recommend_scopes(
                nn.Sequential(small_network(), Detached()), noise_batches(2)
            ),
            "model: expected outputs with a gradient, whose noise can be measured, got none",
        ),
        (
            lambda: normscope.recommend_scopes(small_network(), [x / 0 for x in noise_batches(8)]),
            "expected finite inputs and gradients of every layer, got NaN or infinity in 1",
        ),
        (
            lambda: normscope.recommend_scopes(nn.DataParallel(small_network()), noise_batches(8)),
            "model: expected the model in the DataParallel, got the wrapper; pass model.module",
        ),
        (
            lambda: normscope.recommend_scopes(
                nn.Sequential(nn.LazyLinear(3), normscope.BatchNorm1d(3)), [torch.randn(4, 3)]
            ),
            r"expected one that knows its shapes, got 0\.weight",
        ),
        (
            lambda: normscope.set_scope(two_layers(), "local", include=["0.*", "head.*"]),
            r"include: expected patterns that match a layer's name \('0\.1', '2'\), got 'head\.\*'",
        ),
        (
            lambda: normscope.set_scope(two_layers(), "local", exclude="neck"),
            "exclude: .* got 'neck'",
        ),
        (lambda: normscope.set_scope(two_layers(), "galaxy"), "scope"),
        (
            lambda: normscope.set_scope(nn.Sequential(nn.BatchNorm1d(3)), "local"),
            "model: expected layers of normscope .* got Sequential, which has none",
        ),
        (
            lambda: normscope.ProgressiveScope(two_layers(), ["local", "world"], [0]),
            r"milestones: expected one for each .* got \[0\] for \['local', 'world'\]",
        ),
        (
            lambda: normscope.ProgressiveScope(two_layers(), [], []),
            r"at least one scope, got \[\] for \[\]",
        ),
        (
            lambda: normscope.ProgressiveScope(two_layers(), ["local", "world"], [1, 2]),
            r"milestones: expected 0 and then increasing steps, got \[1, 2\]",
        ),
        (
            lambda: normscope.ProgressiveScope(
                two_layers(), ["local", "group:2", "world"], [0, 5, 5]
            ),
            r"milestones: expected 0 and then increasing steps, got \[0, 5, 5\]",
        ),
        (lambda: normscope.ProgressiveScope(two_layers(), ["galaxy"], [0]), "scope"),
        (
            lambda: normscope.ProgressiveScope(two_layers(), ["local"], [0], include="neck"),
            "got 'neck'",
        ),
        (
            lambda: normscope.ProgressiveScope.doubling(two_layers(), total_steps=0),
            "total_steps: expected at least 1, one for each of local, got 0",
        ),
        (
            lambda: normscope.ProgressiveScope(two_layers(), ["local"], [0]).load_state_dict(
                {"step": 3}
            ),
            r"state_dict: expected last_step, an int of at least 0, got \{'step': 3\}",
        ),
        *(
            (
                lambda numbers=numbers: Costs(call=numbers),
                r"^call: expected a latency and .* of at least 0, got \(",
            )
            for numbers in [(math.nan, 0), (0, -1), (0, math.nan), (1, 2, 3)]
        ),
        (
            lambda: exchange_seconds(5152, 1, 2, Costs()),
            "^costs: expected shared_memory, got None; measure with sev",
        ),
        (
            lambda: exchange_seconds(5152, 2, 1, Costs(call=(0, 0))),
            "^costs: expected message, got None; measure with two",
        ),
        (measure, "measure: expected a default process group"),
    ],
)
def test_a_wrong_argument_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_layer_alone_cannot_be_traced() -> None:
    with pytest.raises(TypeError, match="root: expected a model that has the layer, got"):
        fx.symbolic_trace(normscope.BatchNorm2d(3))
