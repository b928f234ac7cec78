# SPDX-License-Identifier: Apache-2.0
"""A layer with an activation as a module: graphs, memory, residuals and names."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
from oracle import ACTIVATED, LAYERS, assert_equal, results_of
from torch import nn
from torch.nn import functional

import normscope
from normscope.layers import Activation
from normscope.layers.activated import MODULES

pytestmark = pytest.mark.on_device


@pytest.mark.own_kernels
@pytest.mark.usefixtures("quiet_compiler")
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", torch.float32),
        pytest.param("inductor", torch.float32, marks=pytest.mark.slow),
        pytest.param("inductor", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_exact_graphs_have_the_bits_of_eager_mode_whatever_the_compiler(
    activation: Activation, backend: str, dtype: torch.dtype
) -> None:
    layer = normscope.BatchNormAct2d(3, activation=activation, scope="slices:2")
    alone = copy.deepcopy(layer)
    inputs = [(torch.randn(4, 3, 5, 2) + 30).to(dtype) for _ in range(2)]
    compiled = torch.compile(layer, backend=backend, fullgraph=True)

    # After a residual, these two are operations of torch, whose bits inductor may change.
    is_of_torch = activation in ("silu", "hard_swish") and backend == "inductor"
    for number in (1,) if is_of_torch else (1, 2):
        with normscope.training.exact_graphs():
            got = results_of(layer, *inputs[:number], call=compiled)

        assert_equal(got, results_of(alone, *inputs[:number]))


def kept_for_backward(layer: nn.Module, *inputs: torch.Tensor) -> tuple[set[int], torch.Tensor]:
    """Return the addresses of the tensors that autograd saves, and the output."""
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(*inputs)
    return kept, y


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("activation", "residual"),
    [(activation, False) for activation in get_args(Activation)] + [("relu", True)],
)
def test_only_x_and_with_a_residual_y_are_saved_for_backward(
    activation: Activation, *, residual: bool
) -> None:
    layer = normscope.BatchNormAct2d(3, activation=activation, scope="local")
    x, other = (torch.randn(4, 3, 32, 32, requires_grad=True) for _ in range(2))

    kept, y = kept_for_backward(layer, x, *([other] if residual else []))

    parameters = {place(parameter) for parameter in layer.parameters()}
    assert place(x) in kept
    assert (place(y) in kept) == residual
    # Apart from these, only the statistics are saved.
    assert len(kept - parameters - {place(x), place(y)}) <= 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 3, 5, 2), torch.float64),
        ((4, 3, 5, 2), torch.bfloat16),
        ((1, 3, 1, 1), torch.float32),
        ((2,), torch.float32),
        ((), torch.float64),
        ((2, 4, 3, 5, 2), torch.float32),
    ],
)
def test_a_sum_is_broadcast_and_promoted_as_in_torch(
    shape: tuple[int, ...], dtype: torch.dtype, *, training: bool
) -> None:
    layer = normscope.BatchNormAct2d(3, scope="local").train(training)
    plain = normscope.BatchNorm2d(3, scope="local").train(training)
    x, residual = torch.randn(4, 3, 5, 2), torch.randn(shape, dtype=dtype)

    def parts(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return functional.relu(plain(x) + residual)

    assert_equal(results_of(layer, x, residual), results_of(plain, x, residual, call=parts))


@pytest.mark.parametrize("dims", LAYERS)
def test_repr_is_torch_s_with_scope_and_activation(dims: int) -> None:
    layer_class, theirs = ACTIVATED[dims], LAYERS[dims]
    arguments: Any = (3, 1e-3, 0.2, True, True, "cpu", torch.float64)
    layer = layer_class(*arguments, activation="leaky_relu", negative_slope=0.25, scope="local")
    plain = theirs(*arguments)

    assert isinstance(layer, theirs)
    words = "scope=local, activation=leaky_relu(0.25))"
    assert (
        repr(layer)
        == f"{layer_class.__name__}{repr(plain).removeprefix(theirs.__name__)[:-1]}, {words}"
    )
    plain.load_state_dict(layer.state_dict())
    assert list(layer.state_dict()) == list(plain.state_dict())
    x = torch.randn((4, 3, 2, 3, 2)[:dims], dtype=torch.float64)
    expected = functional.leaky_relu(plain.eval()(x) + x, 0.25)
    assert torch.equal(layer.eval()(x, residual=x), expected)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("activation", ["relu6", "leaky_relu", "silu", "hard_swish"])
def test_an_operation_in_place_may_follow(activation: Activation, *, has_residual: bool) -> None:
    # torch's relu keeps y for backward, and refuses this.
    act, plain = normscope.BatchNormAct1d(3, activation=activation), nn.BatchNorm1d(3)
    apply = MODULES[activation]()

    def of_layer(x: torch.Tensor) -> torch.Tensor:
        return act(x, x if has_residual else None).mul_(2)  # type: ignore[no-any-return]

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        return apply(plain(x) + x if has_residual else plain(x)).mul_(2)  # type: ignore[no-any-return]

    x = torch.randn(8, 3)
    # A few dozen roundings of 1e-7; SiLU's own adds two.
    got, expected = results_of(act, x, call=of_layer), results_of(plain, x, call=one_by_one)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
