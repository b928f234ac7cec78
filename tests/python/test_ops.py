# SPDX-License-Identifier: Apache-2.0
"""The ops under torch's own checks, torch.compile, autocast and inference mode."""

import warnings
from typing import Any

import pytest
import torch
from oracle import results_of
from rank_pool import RankPool
from torch import distributed

import normscope

pytestmark = pytest.mark.on_device

Tensors = dict[str, torch.Tensor]

X = (6, 3, 4, 5)


def forward_arguments(*, slices: int = 1, differentiable: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    scope = "local" if slices == 1 else f"slices:{slices}"
    differentiated = [torch.randn(X), torch.ones(3), torch.zeros(3)]
    buffers = (torch.zeros(3), torch.ones(3), torch.tensor(0))
    for tensor in differentiated:
        tensor.requires_grad_(differentiable)
    if not differentiable:
        differentiated[0] = differentiated[0].to(memory_format=torch.channels_last)
    return (*differentiated, *buffers, 0.1, 1e-5, [4], "pooled", scope, "", "layer")


def opcheck(op: Any, *arguments: Any, **keywords: Any) -> None:
    torch.library.opcheck(op.default, arguments, keywords)


@pytest.mark.own_kernels
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("affine", [True, False])
def test_opcheck_passes(slices: int, *, affine: bool) -> None:
    ops = torch.ops.normscope
    arguments = forward_arguments(slices=slices)
    opcheck(ops.batch_norm_forward, *arguments)
    opcheck(ops.batch_norm_forward, *arguments, accumulated=torch.zeros(34, dtype=torch.float64))
    opcheck(ops.batch_norm_statistics, *arguments)
    _, statistics, *_ = ops.batch_norm_forward(*arguments)
    opcheck(ops.batch_norm_with_statistics, *arguments[:3], statistics)
    x, weight, scope = arguments[0], arguments[1] if affine else None, arguments[10]
    gradients, place = (torch.randn_like(x), x, weight, statistics), (scope, "", "layer")
    for op in (ops.batch_norm_backward, ops.batch_norm_gradient_sums):
        opcheck(op, *gradients, True, affine, affine, *place)  # noqa: FBT003
    opcheck(ops.batch_norm_double_backward, torch.randn(X), weight, None, *gradients, *place)


def apply(coefficients: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    """Apply the coefficients of slices: of y to x, or of dx to x and dy."""
    slices = zip(coefficients, *(t.chunk(len(coefficients)) for t in tensors), strict=True)
    results = []
    for values, x, *dy in slices:
        c = values[:, :, None, None]
        xmu = (x - c[0]) - c[1]
        results.append(((dy[0] - c[3]) - xmu * c[4]) * c[2] if dy else xmu * c[2] + c[3])
    return torch.cat(results)


@pytest.mark.parametrize("slices", [1, 2])
def test_the_coefficients_of_graphs_are_those_of_a_layer(slices: int) -> None:
    ops = torch.ops.normscope
    x, weight, bias, *buffers = forward_arguments()[:6]
    weight, bias = weight * 3, bias + 2
    scope = "local" if slices == 1 else f"slices:{slices}"
    constants = (0.1, 1e-5, [4], "pooled", scope, "", "layer")
    layer = normscope.BatchNorm2d(3, scope=scope)
    layer.load_state_dict({**layer.state_dict(), "weight": weight, "bias": bias})
    x.requires_grad_()
    y = layer(x)
    dy = torch.randn_like(x)
    y.backward(dy)
    given = x.detach()

    statistics, of_y, *new_buffers, _ = ops.batch_norm_statistics(
        given, weight, bias, *buffers, *constants
    )
    wants = (True, True, True)
    of_dx, *gradients = ops.batch_norm_gradient_sums(
        dy, given, weight, statistics, *wants, *constants[-3:]
    )

    got = [apply(of_y, given), apply(of_dx, given, dy), *gradients, *new_buffers]
    expected = [y, x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
    for value, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(value, wanted.detach())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2)])
def test_opcheck_passes_for_the_ops_that_take_statistics(order: tuple[int, ...]) -> None:
    ops = torch.ops.normscope
    x, weight, bias, *buffers = forward_arguments()[:6]
    x = x.permute(order).contiguous().permute(order)  # of which two in a row change nothing
    moments = ops.batch_norm_moments(x)
    statistics = ops.batch_norm_finalize(moments, *buffers, 0.1, 1e-5, x.dtype)
    dy = torch.randn_like(x)
    sums, *_ = ops.batch_norm_part_gradient_sums(dy, x, statistics)
    opcheck(ops.batch_norm_moments, x)
    opcheck(ops.batch_norm_finalize, moments, *buffers, 0.1, 1e-5, x.dtype)
    opcheck(ops.batch_norm_part_gradient_sums, dy, x, statistics)
    opcheck(ops.batch_norm_part_input_gradient, dy, x, weight, statistics, sums)
    opcheck(ops.batch_norm_with_statistics, x, weight, bias, statistics)
    wants = (True, True, True)
    opcheck(ops.batch_norm_backward, dy, x, weight, statistics, *wants, "local", "", "layer")


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a check that torch does not have yet
def test_opcheck_passes_for_a_differentiated_forward(slices: int) -> None:
    arguments = forward_arguments(slices=slices, differentiable=True)
    opcheck(torch.ops.normscope.batch_norm_forward, *arguments)


def compiled_and_eager(scope: str, backend: str) -> list[tuple[Tensors, Tensors]]:
    """Return the results of two steps of a layer."""
    torch.compiler.reset()  # torch limits the number of graphs for the same code
    ours, theirs = (normscope.BatchNorm2d(3, scope=scope) for _ in range(2))
    torch.manual_seed(distributed.get_rank())
    batches = torch.randn(2, 4, 3, 9, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own warnings
        compiled = torch.compile(ours, fullgraph=True, backend=backend)
        return [
            (results_of(ours, x, dy=x.cos(), call=compiled), results_of(theirs, x, dy=x.cos()))
            for x in batches
        ]


# The drawn programs of test_programs.py have graphs of other scopes.
@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("scope", "backend"),
    [
        *((scope, "aot_eager") for scope in ("norm_batch:8", "norm_batch:2", "ranks:0,2", "node")),
        ("world", "inductor"),
        pytest.param("slices:3", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_full_graph_equals_eager_on_all_ranks(
    ranks: RankPool, scope: str, backend: str
) -> None:
    size = 3 if backend == "aot_eager" else 2

    for steps in ranks.run(size, compiled_and_eager, scope, backend, hang_seconds=400):
        for compiled, eager in steps:
            # A compiler rounds the operations after the statistics in its own way: a few roundings
            # of numbers of order one.
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def compiled_for_any_batch(scope: str) -> bool:
    torch.compiler.reset()  # torch limits the number of graphs for the same code
    eager = normscope.BatchNorm2d(3, scope=scope)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own warnings
        compiled = torch.compile(eager, fullgraph=True, dynamic=True)
        batches = [torch.randn(samples, 3, 5, 5) for samples in (4, 6, 9)]
        return all(torch.equal(compiled(x), eager(x)) for x in batches)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["local", "slices:3", "norm_batch:2"])
def test_a_graph_with_dynamic_batch_size_equals_eager(ranks: RankPool, scope: str) -> None:
    assert ranks.run(1, compiled_for_any_batch, scope, hang_seconds=400) == [True]


def test_inference_mode_updates_the_running_statistics() -> None:
    layer = normscope.BatchNorm2d(3)
    with torch.inference_mode():
        y = layer(torch.randn(X) + 1)

    assert y.is_inference()
    assert layer.num_batches_tracked is not None
    assert layer.num_batches_tracked.item() == 1


@pytest.mark.own_kernels
def test_autograd_detects_a_change_of_running_statistics() -> None:
    layer = normscope.BatchNorm2d(3).eval()
    x = torch.randn(X, requires_grad=True)
    y = layer(x).sum()
    layer.train()(x.detach())

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
