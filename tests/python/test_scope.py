# SPDX-License-Identifier: Apache-2.0
"""Scopes as Python values."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope import Scope

counts = st.integers(min_value=1, max_value=2**31)
texts = st.one_of(
    st.sampled_from(["local", "node", "world"]),
    st.builds("{}:{}".format, st.sampled_from(["slices", "group", "norm_batch"]), counts),
)


@given(texts)
def test_a_scope_prints_as_it_was_written(text: str) -> None:
    scope = Scope(text)

    assert str(scope) == text
    assert Scope(str(scope)) == scope == Scope(scope)  # type: ignore[arg-type]
    assert hash(Scope(text)) == hash(scope)


def test_constructors_write_what_can_be_parsed() -> None:
    assert str(Scope.slices(8)) == "slices:8"
    assert str(Scope.local()) == "local"
    assert str(Scope.group(4)) == "group:4"
    assert str(Scope.node()) == "node"
    assert str(Scope.world()) == "world"
    assert str(Scope.ranks([[0, 1], [2, 3]])) == "ranks:0,1/2,3"
    assert str(Scope.norm_batch(32)) == "norm_batch:32"


@pytest.mark.parametrize(
    "text",
    ["", "word", "Local", "local:1", "slices", "slices:", "slices:0", "slices:-1", "slices:1.5",
     "group:x", "ranks:", "ranks:0,0", "ranks:0/0", "norm_batch:0", " world", "world "],
)  # fmt: skip
def test_malformed_scopes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"scope: .*expected .*got"):
        Scope(text)


def test_scopes_are_immutable_and_can_be_copied() -> None:
    scope = Scope("ranks:0,1/2,3")

    with pytest.raises(AttributeError):
        scope.text = "local"  # type: ignore[misc]
    assert copy.deepcopy(scope) == pickle.loads(pickle.dumps(scope)) == scope
