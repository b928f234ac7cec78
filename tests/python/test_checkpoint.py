# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: one running update, and with checkpoint_context one synchronization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import normscope

pytestmark = pytest.mark.portable

Checkpoint = Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


def nested(
    inner: Checkpoint,
    outer: Checkpoint,
    block: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
) -> torch.Tensor:
    return outer(lambda t: inner(block, t), x)


CHECKPOINTS: dict[str, Checkpoint] = {
    "none": lambda block, x: block(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "with context": partial(
        checkpoint, use_reentrant=False, context_fn=normscope.checkpoint_context
    ),
    "with context, to the end": partial(
        checkpoint,
        use_reentrant=False,
        context_fn=normscope.checkpoint_context,
        early_stop=False,
    ),
}
CHECKPOINTS |= {
    f"{inner} in {outer}": partial(nested, CHECKPOINTS[inner], CHECKPOINTS[outer])
    for inner, outer in product(("reentrant", "non-reentrant"), repeat=2)
}

# The drawn programs do this with other kernels.
every_checkpoint = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.own_kernels) for kind in CHECKPOINTS if kind != "none"],
)


def block_of(scope: str) -> torch.nn.Module:
    torch.manual_seed(0)
    block = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 3, 1),
        torch.nn.BatchNorm2d(3, momentum=None),
        torch.nn.Sigmoid(),
    )
    return normscope.convert(block.double(), scope)


class Twice(torch.nn.Module):
    """A block that checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = normscope.BatchNorm1d(3), normscope.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = CHECKPOINTS["with context"](self.inner, self.outer(x).sin())
        y: torch.Tensor = self.outer(hidden.sin())
        return y


def nested_and_repeated() -> tuple[int, list[int], bool]:
    block = Twice()
    x = torch.randn(4, 3, requires_grad=True)
    before = normscope.training.communication_counters().calls
    y = CHECKPOINTS["with context"](block, x)
    [first] = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    [second] = torch.autograd.grad(y.square().sum(), x)
    calls = normscope.training.communication_counters().calls - before
    layers = (block.outer, block.inner)
    updates = [int(layer.num_batches_tracked or 0) for layer in layers]
    return calls, updates, torch.equal(first, second)


@pytest.mark.on_device
def test_checkpoints_can_be_nested_and_repeated(ranks: RankPool) -> None:
    for calls, updates, equal in ranks.run(2, nested_and_repeated):
        assert calls == 3 + 2 * 3  # three forwards, and three more in each of the two backwards
        assert updates == [2, 1]
        assert equal


def selective(saved: tuple[Any, ...]) -> Any:
    """Return a context_fn that saves the results of some ops, with these contexts entered last."""

    def policy(_context: object, op: object, *_: object, **__: object) -> CheckpointPolicy:
        must_save = op in saved
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    @contextmanager
    def both(outer: Any, inner: Any) -> Iterator[None]:
        with outer, inner:
            yield

    def contexts() -> tuple[Any, Any]:
        outer = create_selective_checkpoint_contexts(policy)
        forward, recomputation = zip(outer, normscope.checkpoint_context(), strict=True)
        return both(*forward), both(*recomputation)

    return contexts


@pytest.mark.on_device
@pytest.mark.parametrize(
    "saved",
    [(), (torch.ops.aten.addmm.default,), (torch.ops.normscope.batch_norm_forward.default,)],
)
def test_selective_checkpoints_can_be_combined(saved: tuple[Any, ...]) -> None:
    block = nn.Sequential(nn.Linear(3, 4), normscope.BatchNorm1d(4), normscope.BatchNormAct1d(4))
    x = torch.randn(5, 3, requires_grad=True)
    [expected] = torch.autograd.grad(block(x).sin().sum(), x)

    y = checkpoint(block, x, use_reentrant=False, context_fn=selective(saved))

    [got] = torch.autograd.grad(y.sin().sum(), x)
    assert torch.equal(got, expected)
    assert all(layer.num_batches_tracked == 2 for layer in list(block)[1:])


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("kind", "in_another_thread"), [("reentrant", False), ("non-reentrant", True)]
)
def test_a_compiled_block_refuses_a_change_of_its_scope_before_the_recomputation(
    kind: str, *, in_another_thread: bool
) -> None:
    layer = normscope.BatchNorm1d(3, scope="local")
    block = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 3, requires_grad=True)

    def change_to(scope: str) -> None:
        if in_another_thread:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(normscope.set_scope, layer, scope).result()
        else:
            normscope.set_scope(layer, scope)

    for _ in range(2):
        y = CHECKPOINTS[kind](block, x)
        y.sin().sum().backward()
        change_to("slices:2")
    y = CHECKPOINTS[kind](block, x)
    change_to("local")

    with pytest.raises(RuntimeError, match="expected no change of a scope between the forward"):
        y.sin().sum().backward()


@pytest.mark.own_kernels
def test_a_recomputation_of_another_layer_or_of_more_is_named() -> None:
    forward, recomputation = normscope.checkpoint_context()
    model = normscope.convert(nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2)))
    x = torch.randn(4, 3)
    with forward:
        expected = model[0](x)

    with recomputation, pytest.raises(RuntimeError, match=r"run 0 on \[4, 3\] next.*got 1 on"):
        model[1](x)
    with recomputation:
        assert torch.equal(model[0](x), expected)
        with pytest.raises(RuntimeError, match="the recomputation to run no further layer"):
            model[0](x)


class Sine(torch.autograd.Function):
    """A function in Python, whose node is of the class of a reentrant checkpoint's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [x] = ctx.saved_tensors
        return gradients[0] * x.cos()


def composed(outer: Callable[..., Any], inner: Callable[..., Any], x: torch.Tensor) -> Any:
    return outer(inner(x))


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("sine", "next_kind"), [(torch.sin, "reentrant"), (Sine.apply, "non-reentrant")]
)
def test_a_node_after_a_layer_belongs_to_its_forward_and_not_to_the_next(
    sine: Callable[[torch.Tensor], torch.Tensor], next_kind: str
) -> None:
    gradients = []
    for changes in (False, True):
        layer = normscope.BatchNorm1d(3, scope="local")
        x = torch.linspace(0, 1, 12).view(4, 3).requires_grad_()
        y = CHECKPOINTS["non-reentrant"](partial(composed, sine, layer), x)
        if changes:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(normscope.set_scope, layer, "slices:2").result()
            CHECKPOINTS[next_kind](layer, x)
        gradients.append(torch.autograd.grad(y.square().sum(), x))

    assert torch.equal(*map(torch.stack, gradients))


class Refused(Exception):  # noqa: N818
    """What a program raises in a backward."""


def refuse(_: torch.Tensor) -> None:
    raise Refused


@every_checkpoint
def test_a_backward_that_raised_changes_no_later_recomputation(kind: str) -> None:
    gradients = []
    for fails in (False, True):
        block = block_of("slices:2")
        x, other = torch.randn(
            2, 4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        x, other = x.requires_grad_(), other.requires_grad_()
        y = CHECKPOINTS[kind](block, x)
        normscope.set_scope(block, "local")
        z = CHECKPOINTS[kind](block, other)
        if fails:
            x.register_hook(refuse)
            with pytest.raises(Refused):
                y.square().sum().backward()
        z.square().sum().backward()
        assert other.grad is not None
        gradients.append(other.grad)

    assert torch.equal(*gradients)


def test_a_recomputation_after_too_many_changes_of_the_scope_raises() -> None:
    layer = normscope.BatchNorm1d(3, scope="local")
    x = torch.randn(4, 3, requires_grad=True)
    y = CHECKPOINTS["non-reentrant"](layer, x)
    for _ in range(50):
        for scope in ("slices:2", "local"):
            layer.scope = normscope.Scope(scope)
            layer(x)

    with pytest.raises(RuntimeError, match="scope: expected at most"):
        y.sum().backward()


def numbered_between_forward_and_recomputation() -> list[int]:
    layer = normscope.BatchNorm1d(3, scope="local")
    x = torch.randn(4, 3, requires_grad=True)
    y = CHECKPOINTS["with context"](layer, x)
    normscope.set_scope(layer, "world")
    layer(x)  # whose exchange gives the layer without a name a number
    y.sin().sum().backward()
    return [*x.shape]


def test_a_layer_without_a_name_may_get_its_number_before_a_recomputation(ranks: RankPool) -> None:
    assert ranks.run(2, numbered_between_forward_and_recomputation) == [[4, 3]] * 2
