# SPDX-License-Identifier: Apache-2.0
"""What version 0.2.0 had elsewhere still works."""

import pickle
from importlib import import_module

import pytest
import torch

import normscope

# The modules of 0.2.0 with classes that pickles contain.
MODULES_OF_PICKLES = {
    "normscope.activated": "normscope.layers.activated",
    "normscope.conversion": "normscope.models.conversion",
    "normscope.counters": "normscope.training.counters",
    "normscope.deployment": "normscope.models.deployment",
    "normscope.lazy": "normscope.layers.lazy",
    "normscope.modules": "normscope.layers.batch_norm",
    "normscope.schedule": "normscope.scopes.schedule",
    "normscope.scope": "normscope.layers.scope",
    "normscope.scope_plan": "normscope.scopes.plan",
    "normscope.sync": "normscope.models.sync",
}


def as_pickled_by_the_last_version(value: object) -> bytes:
    pickled = pickle.dumps(value, protocol=0)  # which has names of modules as lines of text
    for old, new in MODULES_OF_PICKLES.items():
        pickled = pickled.replace(f"c{new}\n".encode(), f"c{old}\n".encode())
    assert b"cnormscope.layers" not in pickled
    assert b"cnormscope.models" not in pickled
    return pickled


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("CommunicationCounters", normscope.training.CommunicationCounters),
        ("Costs", normscope.costs.Costs),
        ("Prediction", normscope.costs.Prediction),
        ("communication_counters", normscope.training.communication_counters),
        ("detect_non_finite", normscope.training.detect_non_finite),
        ("empty_batch_like", normscope.training.empty_batch_like),
        ("exact_graphs", normscope.training.exact_graphs),
        ("measure_costs", normscope.costs.measure),
        ("predict", normscope.costs.predict),
    ],
)
def test_names_still_work(name: str, moved: object) -> None:
    assert getattr(normscope, name) is moved
    assert name not in normscope.__all__


def test_a_name_that_is_gone_says_what_replaces_it() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'fuse' after version 0\.2\.0; use convert\(model"
    ):
        _ = normscope.fuse  # type: ignore[attr-defined]


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="module 'normscope' has no attribute 'HostCosts'"):
        _ = normscope.HostCosts  # type: ignore[attr-defined]


@pytest.mark.parametrize(("old", "new"), MODULES_OF_PICKLES.items())
def test_modules_can_be_imported_and_are_the_same(old: str, new: str) -> None:
    assert import_module(old) is import_module(new)
    assert import_module(new).__name__ == new


def test_a_model_unpickles() -> None:
    model = torch.nn.Sequential(
        normscope.BatchNorm2d(3, scope="slices:2"),
        normscope.BatchNormAct2d(3, scope="local", activation="silu"),
        normscope.convert(torch.nn.BatchNorm2d(3), "local"),
        normscope.SyncBatchNorm(3),
    )
    x = torch.randn(4, 3, 5, 5)

    loaded = pickle.loads(as_pickled_by_the_last_version(model))

    assert [type(layer) for layer in loaded] == [type(layer) for layer in model]
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)
    assert type(normscope.revert(loaded)[2]) is torch.nn.BatchNorm2d
