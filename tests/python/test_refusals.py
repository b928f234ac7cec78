# SPDX-License-Identifier: Apache-2.0
"""Errors name the argument, what was expected and what was given; nothing is updated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import IS_TORCH_2_11
from refusals import unchanged
from torch.distributed import GroupMember

import normscope
from normscope.functional import batch_norm

pytestmark = pytest.mark.on_device

X = torch.randn(4, 3, 5, 5)
MASK = torch.ones(4, 1, 5, 5, dtype=torch.bool)


def layer() -> normscope.BatchNorm2d:
    return normscope.BatchNorm2d(3)


def with_weight(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: batch_norm(X, None, None, weight, training=True)


def with_running(mean: torch.Tensor | None, var: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    return lambda: batch_norm(X, mean, var, training=True)


def named() -> normscope.BatchNorm2d:
    """Return a layer with the name "0"."""
    model = normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm2d(3)), "local")
    assert isinstance(model[0], normscope.BatchNorm2d)
    return model[0]


def without_weight(layer: normscope.BatchNorm2d) -> normscope.BatchNorm2d:
    del layer.weight
    return layer


def with_activation(activation: str) -> Callable[[], torch.Tensor]:
    """Evaluate a layer whose activation has been changed."""
    layer = normscope.BatchNormAct2d(3).eval()
    layer.activation = activation  # type: ignore[assignment]
    return lambda: layer(X)


def accumulated(moments: torch.Tensor) -> None:
    torch.ops.normscope.batch_norm_forward(
        torch.randn(4, 3), *[None] * 6, 1e-5, [], "pooled", "local", "", "", accumulated=moments
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: normscope.BatchNorm1d(3)(X),
            ValueError,
            "x: expected 2 or 3 dimensions, got 4",
        ),
        (lambda: normscope.BatchNorm(3)(X[0, 0, 0]), ValueError, "x: expected at least 2 dim"),
        (
            lambda: batch_norm(torch.empty(0), None, None, training=True),
            ValueError,
            "x: expected at least 2 dimensions, got 1 (an empty batch has the shape [0, channels])",
        ),
        (
            lambda: normscope.BatchNorm(3).eval()(torch.empty(0)),
            ValueError,
            "x: expected at least 2 dimensions, got 1 (an empty batch has the shape [0, channels])",
        ),
        (lambda: layer()(X[:, :2]), RuntimeError, "x: expected 3 channels (weight has 3), got 2"),
        (
            lambda: normscope.BatchNorm2d(3, affine=False)(X[:, :2]),
            RuntimeError,
            "x: expected 3 channels (running_mean has 3), got 2",
        ),
        (
            lambda: layer()(X.long()),
            RuntimeError,
            "x: expected float32, float64, bfloat16 or float16, got int64",
        ),
        (
            lambda: layer()(X.to("meta")),
            RuntimeError,
            "weight: expected the device of x (meta), got cpu",
        ),
        (with_weight(torch.ones(3, 1)), RuntimeError, "weight: expected 1 dimension, got 2"),
        (
            with_weight(torch.ones(3).double()),
            RuntimeError,
            "weight: expected float32 or the dtype of x (float32), got float64",
        ),
        (with_running(torch.zeros(3), None), RuntimeError, "running_var: expected a tensor"),
        (
            lambda: batch_norm(X, None, None, training=True, eps=0.0),
            ValueError,
            "eps: expected a positive number in training, got 0",
        ),
        pytest.param(
            lambda: batch_norm(X, torch.zeros(3), torch.ones(3), eps=-1.0),
            ValueError,
            "eps must be non-negative, but got -1.0",
            marks=pytest.mark.skipif(IS_TORCH_2_11, reason="torch 2.11: takes any eps"),
        ),
        *(
            (
                lambda mask=mask: batch_norm(
                    X,
                    None,
                    None,
                    training=True,
                    mask=mask,
                    slice_stats="last",  # type: ignore[arg-type]
                ),
                ValueError,
                'slice_stats: expected pooled, first or sequential, got "last"',
            )
            for mask in (None, MASK)
        ),
        *(
            (
                lambda group=group: normscope.BatchNorm2d(3, process_group=group),
                ValueError,
                "process_group: expected a process group or mesh that this rank is in, got "
                + given,
            )
            for group, given in (
                ("tensor_parallel", "'tensor_parallel'"),
                (GroupMember.NON_GROUP_MEMBER, "a group of other ranks"),
            )
        ),
        (
            lambda: normscope.BatchNorm2d(3, slice_stats="last"),  # type: ignore[arg-type]
            ValueError,
            "slice_stats: expected pooled, first or sequential, got 'last'",
        ),
        (
            lambda: torch.ops.normscope.batch_norm_forward(
                X, None, None, None, None, None, 0.1, 1e-5, (), "pooled", "norm_batch:8", "", ""
            ),
            ValueError,
            "scope: expected a scope resolved by the op resolve_scope, got norm_batch:8",
        ),
        (
            lambda: normscope.BatchNormAct2d(3, activation="gelu"),  # type: ignore[arg-type]
            ValueError,
            "activation: expected one of relu, relu6, leaky_relu, silu, hard_swish, got 'gelu'",
        ),
        (
            with_activation("gelu"),
            ValueError,
            "activation: expected one of relu, relu6, leaky_relu, silu, hard_swish, got 'gelu'",
        ),
        (lambda: normscope.BatchNormAct2d(3, scope="all"), ValueError, "scope: expected slices:K"),
        (
            lambda: accumulated(torch.zeros(34)),
            RuntimeError,
            "accumulated: expected float64, got float32",
        ),
        (
            lambda: accumulated(torch.zeros(33).double()),
            RuntimeError,
            "accumulated: expected the shape [34], got [33]",
        ),
        (
            lambda: accumulated(torch.zeros(68).double()[::2]),
            RuntimeError,
            "accumulated: expected a contiguous tensor",
        ),
        (
            lambda: named()(None),
            TypeError,
            "0: expected a strided tensor for x in training, got No",
        ),
        (
            lambda: named()([1.0]),
            TypeError,
            "0: expected a strided tensor for x in training, got l",
        ),
        (
            lambda: named()(torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged)),
            TypeError,
            "0: expected a strided tensor for x in training, got a nested one; pad it, and give "
            "the layer a mask",
        ),
        (
            lambda: named()(X.to_sparse()),
            TypeError,
            "0: expected a strided tensor for x in training, got one of torch.sparse_coo",
        ),
        (
            lambda: batch_norm(None, None, None, training=True),  # type: ignore[arg-type]
            TypeError,
            "normscope.batch_norm: expected a strided tensor for x in training, got NoneType",
        ),
        (lambda: named()(torch.zeros(1, 3, 1, 1)), ValueError, "torch.Size([1, 3, 1, 1]) in 0"),
        (lambda: without_weight(named())(X), AttributeError, "no attribute 'weight'"),
    ],
)
def test_a_wrong_argument_is_named(
    call: Callable[[], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as raised:
        call()

    assert text in str(raised.value)


@pytest.mark.parametrize("scope", ["local", "world", "slices:2"])
@pytest.mark.parametrize(("tracks", "training"), [(True, True), (False, True), (False, False)])
def test_one_value_per_channel_is_torch_s_error(
    scope: str, *, tracks: bool, training: bool
) -> None:
    ours = normscope.BatchNorm1d(3, scope=scope, track_running_stats=tracks).train(training)
    theirs = torch.nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="Expected more than 1 value") as expected:
        theirs(torch.zeros(1, 3))

    with pytest.raises(ValueError, match="Expected more than 1 value") as got:
        ours(torch.zeros(1, 3))

    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("bad", [X[:, :2], X[0], X.long(), torch.zeros(1, 3, 1, 1)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_call_that_raises_updates_nothing(bad: torch.Tensor, momentum: float | None) -> None:
    layer = normscope.BatchNorm2d(3, momentum=momentum)
    layer(X)
    assert layer.elements_seen == X.numel()

    with unchanged(layer), pytest.raises((ValueError, RuntimeError)):
        layer(bad)


def test_a_slice_of_one_value_raises_and_updates_nothing() -> None:
    layer = normscope.BatchNorm1d(3, scope="slices:2", slice_stats="sequential")

    with unchanged(layer), pytest.raises(ValueError, match="Expected more than 1 value per"):
        layer(torch.randn(3, 3))


@pytest.mark.own_kernels  # under torch's kernels it works
def test_the_mode_for_mutations_of_saved_tensors_is_named() -> None:
    with (
        torch.autograd.graph.allow_mutation_on_saved_tensors(),
        pytest.raises(RuntimeError, match=r"expected no .*allow_mutation_on_saved_tensors\(\)"),
    ):
        layer()(X)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("inputs", "keywords", "error", "text"),
    [
        ((X[0],), {}, ValueError, "x: expected 4 dimensions, got 3"),
        ((X[0], X[0]), {}, ValueError, "x: expected 4 dimensions, got 3"),
        ((X[0],), {"mask": MASK[0]}, ValueError, "x: expected 4 dimensions, got 3"),
        ((X[:, :2],), {"mask": MASK}, RuntimeError, ""),
        ((X, X.to("meta")), {}, RuntimeError, ""),
        ((X, X[..., :2]), {}, RuntimeError, ""),
        (
            (X, torch.randn(2, 4, 3, 5, 5)),
            {"mask": MASK},
            ValueError,
            "residual: expected a shape that broadcasts to x's, [4, 3, 5, 5], with a mask, got",
        ),
        *(
            ((X,), {"mask": mask}, ValueError, f"mask: expected {text}")
            for mask, text in [
                (MASK.float(), "a tensor of torch.bool, got torch.float32"),
                (MASK.tolist(), "a tensor of torch.bool, got list"),
                (MASK[:, 0], "shape [4, 1, 5, 5], as x [N, 1, *], got [4, 5, 5]"),
                (MASK[:1], "shape [4, 1, 5, 5], as x [N, 1, *], got [1, 1, 5, 5]"),
                (MASK.to("meta"), "x's device, cpu, got meta"),
            ]
        ),
    ],
)
def test_inputs_that_do_not_match_are_refused_in_any_mode(
    inputs: tuple[torch.Tensor, ...],
    keywords: dict[str, Any],
    error: type[Exception],
    text: str,
    *,
    training: bool,
) -> None:
    layer = normscope.BatchNormAct2d(3, scope="local").train(training)

    with pytest.raises(error) as raised:
        layer(*inputs, **keywords)

    assert text in str(raised.value)
