# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of costs and predictions, and files that hold no costs or no plan."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from noisy_network import noise_batches, small_network
from torch import nn

import normscope
from normscope.costs import Costs, measure, predict
from normscope.costs.model import exchange_seconds
from normscope.scopes import ScopePlan


def predicts(**changes: Any) -> Callable[[], object]:
    arguments: dict[str, Any] = {"plan": [("bn", 3, "world")], "hosts": 2, "ranks_per_host": 2}
    return lambda: predict(**(arguments | {"costs": Costs.ethernet_25g()} | changes))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (
                lambda numbers=numbers: Costs(call=numbers),
                rf"^call: expected a latency and .* of at least 0, got {re.escape(str(numbers))}",
            )
            for numbers in [(math.nan, 0), (0, -1), (0, math.nan), (1, 2, 3), 3, ("a", "b")]
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
        (predicts(hosts=0), "^hosts: expected at least 1, got 0"),
        (predicts(ranks_per_host=0), "ranks_per_host: expected at least 1, got 0"),
        (predicts(step_time=0.0), "step_time: expected seconds above 0, got 0.0"),
        (predicts(samples=0), "samples: expected at least 1, got 0"),
        (predicts(plan=nn.BatchNorm1d(3)), "plan: expected layers of normscope in training mode"),
        (
            predicts(plan=normscope.BatchNorm1d(3).eval()),
            r"plan: expected layers .* got none; .*train\(\) ends",
        ),
        (predicts(plan=[("bn", 0, "world")]), "plan: expected at least 1 channel, got 0 in bn"),
        (predicts(plan=[("bn", 3, "norm_batch:9")]), "bn: samples: expected the samples per rank"),
        (predicts(plan=[("bn", 3, "town")]), "town"),
        *(
            (predicts(plan=plan), f"plan: expected a plan, a model, .*, got {plan!r}$")
            for plan in ("plan.json", 3)
        ),
    ],
)
def test_a_wrong_argument_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}x", '{"speed": 1}', '{"call": [-1, 0]}', '{"call": ["1", 0]}', '{"call": 1}'],
)
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"costs.json: expected what `python -m normscope measure"):
        Costs.load(path)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def text_of(saved: str) -> str:
        fields = json.loads(saved)
        change(fields)
        return json.dumps(fields)

    return text_of


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _: "{}", r"ScopePlan: expected fields \['layers', .*got \[\]"),
        (lambda _: "[1]", r"ScopePlan: expected fields .*, got list"),
        (lambda text: text[:40], "plan of recommend_scopes, got "),
        (lambda _: "[" * 100_000, "recursion"),
        (changed(lambda plan: plan.update(ranks="4")), "ranks: expected int, got str"),
        (changed(lambda plan: plan.update(ranks=True)), "ranks: expected int, got bool"),
        (changed(lambda plan: plan.update(layers=None)), "layers: expected a list, got null"),
        (
            changed(lambda plan: plan["layers"][0].update(scope="node")),
            "scope 'node' of 1, not a candidate",
        ),
        (
            changed(lambda plan: plan["layers"][0]["candidates"].append(None)),
            "Candidate: expected fields .*, got null",
        ),
    ],
)
def test_a_file_without_a_plan_is_refused(
    tmp_path: Path, damage: Callable[[str], str], message: str
) -> None:
    path = tmp_path / "plan.json"
    normscope.recommend_scopes(small_network(), noise_batches(16), ranks=4).save(path)
    path.write_text(damage(path.read_text()))

    with pytest.raises(ValueError, match=message):
        ScopePlan.load(path)
