# SPDX-License-Identifier: Apache-2.0
"""detect_non_finite on a single rank; test_faults.py has several."""

from __future__ import annotations

import pytest
import torch
from refusals import unchanged

import normscope

pytestmark = pytest.mark.portable


def network(scope: str) -> torch.nn.Sequential:
    return normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm1d(2)), scope)


@pytest.mark.parametrize("scope", ["local", "slices:2"])
def test_a_single_rank_raises_too(scope: str) -> None:
    net = network(scope)
    x = torch.randn(4, 2)
    x[0, 1] = float("nan")

    with (
        unchanged(net),
        normscope.training.detect_non_finite(),
        pytest.raises(RuntimeError, match="got 1 non-finite"),
    ):
        net(x)

    assert net(x).isnan().any()  # off again
    net.eval()
    with normscope.training.detect_non_finite():
        net(x)


def test_finite_values_are_no_error_however_large() -> None:
    with normscope.training.detect_non_finite():
        network("local")(torch.full((4, 2), 3e38))
