# SPDX-License-Identifier: Apache-2.0
"""Scopes as Python values."""

import copy
import pickle

import pytest

from normscope import Scope


def test_constructors_write_what_can_be_parsed() -> None:
    assert str(Scope.slices(8)) == "slices:8"
    assert str(Scope.local()) == "local"
    assert str(Scope.group(4)) == "group:4"
    assert str(Scope.node()) == "node"
    assert str(Scope.world()) == "world"
    assert str(Scope.ranks([[0, 1], [2, 3]])) == "ranks:0,1/2,3"
    assert str(Scope.norm_batch(32)) == "norm_batch:32"


def test_scopes_are_immutable_and_can_be_copied() -> None:
    scope = Scope("ranks:0,1/2,3")

    with pytest.raises(AttributeError):
        scope.text = "local"  # type: ignore[misc]
    for other in (copy.deepcopy(scope), pickle.loads(pickle.dumps(scope)), Scope(scope)):  # type: ignore[arg-type]
        assert other == scope
        assert hash(other) == hash(scope)
