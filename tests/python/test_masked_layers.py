# SPDX-License-Identifier: Apache-2.0
"""Masks combined with other features: residuals, evaluation, graphs, running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from masked_network import Masked, rows_of
from oracle import assert_equal, results_of
from rank_pool import RankPool, split_of
from refusals import unchanged
from torch import distributed, fx, nn
from torch.nn import functional

import normscope

pytestmark = pytest.mark.on_device

# For a few hundred entries of order one in float64: eps 2e-16 times some hundred roundings.
ROUNDING = 1e-12

Call = Callable[..., torch.Tensor]


def inputs(dtype: torch.dtype = torch.float32, count: int = 2) -> list[torch.Tensor]:
    """Return a mask [6, 1, 5, 4], and inputs that are not finite where it is False."""
    mask = torch.rand(6, 1, 5, 4) > 0.5
    trash = torch.tensor([float("nan"), float("inf")], dtype=dtype)
    others = [torch.randn(6, 3, 5, 4, dtype=dtype) + 2 for _ in range(count)]
    return [mask, *(torch.where(mask, x, trash.repeat(10).view(5, 4)) for x in others)]


def on_rows(layer: nn.Module) -> Call:
    """Return a function that does the same with torch's indexing and a layer for rows [M, C]."""

    def call(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = layer(rows_of(x, mask))
        y = rows.new_zeros(x.movedim(1, -1).shape)
        y = y.index_put(mask.squeeze(1).nonzero(as_tuple=True), rows)
        moved: torch.Tensor = y.movedim(-1, 1)
        return moved

    return call


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scope", ["local", "slices:2"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 1, 1), torch.float32), ((), torch.float64), ((6, 3, 5, 4), None)]
)
def test_a_residual_broadcasts_and_promotes(
    scope: str, shape: tuple[int, ...], dtype: torch.dtype | None, *, training: bool
) -> None:
    layer = normscope.BatchNormAct2d(3, scope=scope).train(training)
    plain = normscope.BatchNorm2d(3, scope=scope).train(training)
    mask, x = inputs(count=1)
    residual = torch.randn(shape, dtype=dtype)

    def parts(x: torch.Tensor, residual: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.relu(plain(x, mask=mask) + residual * mask)

    got = results_of(layer, x, residual, mask=mask)
    expected = results_of(plain, x, residual, call=parts, mask=mask)

    # torch sums this gradient in a different order
    torch.testing.assert_close(got.pop("dresidual"), expected.pop("dresidual"))
    assert_equal(got, expected)
    number: Any = 2
    assert torch.equal(layer(x, number, mask=mask), layer(x, torch.tensor(2.0), mask=mask))


@pytest.mark.parametrize("scope", ["world", "slices:3"])
def test_evaluation_has_torch_s_bits_and_hides_masked_values(scope: str) -> None:
    layer = normscope.BatchNorm2d(3, scope=scope)
    mask, x = inputs(count=1)
    layer(x, mask=mask)
    theirs = nn.BatchNorm2d(3).eval()
    theirs.load_state_dict(layer.state_dict())
    clean = torch.where(mask, x, torch.zeros(()))

    def reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = theirs(x)
        return torch.where(mask, y, torch.zeros(()))

    got = results_of(layer.eval(), x, mask=mask)
    assert_equal(got, results_of(theirs, clean, call=reference, mask=mask))


def test_evaluation_without_running_statistics_uses_the_unmasked_values() -> None:
    layer = normscope.BatchNorm2d(3, track_running_stats=False).eval()
    theirs = nn.BatchNorm1d(3, track_running_stats=False).eval()
    mask, x = inputs(count=1)

    got = results_of(layer, x, mask=mask)
    assert_equal(got, results_of(theirs, x, call=on_rows(theirs), mask=mask))
    assert layer(x, mask=mask & False).count_nonzero() == 0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scope", ["local", "slices:2"])
@pytest.mark.parametrize("tracked", [True, False])
def test_the_function_has_the_layer_s_bits(scope: str, *, training: bool, tracked: bool) -> None:
    layer = normscope.BatchNorm2d(3, scope=scope, track_running_stats=tracked).train(training)
    other = copy.deepcopy(layer)
    mask, x = inputs(count=1)

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return normscope.functional.batch_norm(
            x, other.running_mean, other.running_var, other.weight, other.bias, training,
            scope=scope, mask=mask,
        )  # fmt: skip

    got, expected = results_of(other, x, call=function, mask=mask), results_of(layer, x, mask=mask)

    for results in (got, expected):
        results.pop("num_batches_tracked", None)  # the function counts no batches
    assert_equal(got, expected)


@pytest.mark.usefixtures("quiet_compiler")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scope", ["local", "slices:2"])
def test_a_compiled_layer_has_equal_bits_and_is_compiled_once(
    scope: str, *, training: bool
) -> None:
    layer = normscope.BatchNormAct2d(3, scope=scope).train(training)
    alone = copy.deepcopy(layer)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=not training)
    for number in range(4):
        mask, *given = inputs()
        with torch.compiler.set_stance("default" if number < 2 else "fail_on_recompile"):
            got = results_of(layer, *given, call=compiled, mask=mask)

        assert_equal(got, results_of(alone, *given, mask=mask))
    if training:
        with pytest.raises(Exception, match=r"a mask in training: .* compile without fullgraph"):
            torch.compile(layer, backend="eager", fullgraph=True)(given[0], mask=mask)


def test_a_mask_is_an_argument_of_a_traced_module_call() -> None:
    model = Masked(normscope.BatchNorm2d(3, scope="local"))
    mask, x = inputs(count=1)

    traced = fx.symbolic_trace(copy.deepcopy(model))

    assert torch.equal(traced(x, mask), model(x, mask))


def test_detect_non_finite_ignores_masked_values() -> None:
    layer = normscope.BatchNorm2d(3, scope="slices:2", slice_stats="sequential")
    mask, x = inputs(count=1)

    with normscope.training.detect_non_finite():
        layer(x, mask=mask)
        x[-1, 0, 0, 0], mask[-1, 0, 0, 0] = float("nan"), True
        # The first slice alone would not have raised.
        with unchanged(layer), pytest.raises(RuntimeError, match="finite"):
            layer(x, mask=mask)


def estimated(shares: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    mask, x = inputs(torch.float64, 1)
    part = split_of(shares, distributed.get_rank())
    model = Masked(normscope.BatchNorm2d(3, dtype=torch.float64, scope="local"))
    normscope.estimate_running_stats(model, [(x[part], mask[part])])
    return list(model.layer.buffers())[:2]


def test_estimated_running_statistics_are_those_of_unmasked_elements(ranks: RankPool) -> None:
    torch.manual_seed(0)
    mask, x = inputs(torch.float64, 1)
    rows = rows_of(x, mask)

    for mean, var in ranks.run(2, estimated, (2, 4)):
        torch.testing.assert_close(mean, rows.mean(0), rtol=ROUNDING, atol=ROUNDING)
        torch.testing.assert_close(var, rows.var(0), rtol=ROUNDING, atol=ROUNDING)
