# SPDX-License-Identifier: Apache-2.0
"""A layer with an activation as a module: graphs, memory, residuals and names."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.nn import functional

import normscope
from normscope.layers import Activation
from normscope.layers.activated import MODULES

pytestmark = pytest.mark.on_device

LAYERS: list[tuple[type[normscope.BatchNormAct], type[nn.Module], tuple[int, ...]]] = [
    (normscope.BatchNormAct1d, nn.BatchNorm1d, (4, 3)),
    (normscope.BatchNormAct1d, nn.BatchNorm1d, (4, 3, 5)),
    (normscope.BatchNormAct2d, nn.BatchNorm2d, (4, 3, 5, 2)),
    (normscope.BatchNormAct3d, nn.BatchNorm3d, (4, 3, 2, 3, 2)),
]


def step(layer: nn.Module, call: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return all results of a training step."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = call(*leaves)
    found = torch.autograd.grad(y.float().sin().sum(), [*leaves, *layer.parameters()])
    return [y.detach(), *found, *(buffer.clone() for buffer in layer.buffers())]


@pytest.mark.usefixtures("quiet_compiler")
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize(
    ("exact", "backend", "dtype"),
    [
        (False, "aot_eager", torch.float32),
        # Torch's kernels add the gradients of 16-bit slices in another order.
        pytest.param(False, "aot_eager", torch.bfloat16, marks=pytest.mark.own_kernels),
        pytest.param(True, "aot_eager", torch.float32, marks=pytest.mark.own_kernels),
        pytest.param(
            True, "inductor", torch.float32, marks=[pytest.mark.own_kernels, pytest.mark.slow]
        ),
    ],
)
def test_a_graph_has_the_bits_of_eager_mode(
    activation: Activation, dtype: torch.dtype, backend: str, *, exact: bool
) -> None:
    layer = normscope.BatchNormAct2d(3, activation=activation, scope="slices:2")
    alone = copy.deepcopy(layer)
    inputs = [torch.randn(4, 3, 5, 2).to(dtype) for _ in range(2)]
    compiled = torch.compile(layer, backend=backend, fullgraph=True)

    # After a residual, these two are operations of torch, whose bits inductor may change.
    is_of_torch = activation in ("silu", "hard_swish") and backend == "inductor"
    for number in (1,) if is_of_torch else (1, 2):
        with normscope.training.exact_graphs() if exact else nullcontext():
            got = step(layer, compiled, *inputs[:number])
        expected = step(alone, alone, *inputs[:number])

        if activation == "silu" and not exact:  # a graph uses torch's silu
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(
                    a, b, rtol=2e-2, atol=2e-2 if dtype.itemsize == 2 else 1e-5
                )
        else:
            assert all(map(torch.equal, got, expected))


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

    got = step(layer, layer, x, residual)
    expected = step(plain, lambda x, r: functional.relu(plain(x) + r), x, residual)

    for value, want in zip(got, expected, strict=True):
        assert value.dtype == want.dtype
        assert torch.equal(value, want)


@pytest.mark.parametrize(("layer_class", "theirs", "shape"), LAYERS)
def test_repr_is_torch_s_with_scope_and_activation(
    layer_class: type[normscope.BatchNormAct], theirs: type[nn.Module], shape: tuple[int, ...]
) -> None:
    arguments = (3, 1e-3, 0.2, True, True, "cpu", torch.float64)
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
    x = torch.randn(shape, dtype=torch.float64)
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
    for got, expected in zip(step(act, of_layer, x), step(plain, one_by_one, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
