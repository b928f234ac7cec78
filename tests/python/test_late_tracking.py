# SPDX-License-Identifier: Apache-2.0
"""Checkpointing of other libraries: running statistics are updated once for each batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from rank_pool import RankPool, split_of
from refusals import unchanged
from torch import distributed, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import normscope

pytestmark = pytest.mark.on_device

STEPS = 3
SIZES = (2, 3)

# Relative to the largest entry, in float64 (eps 2e-16), condition number one.
RELATIVE = 1e-12

Tensors = dict[str, torch.Tensor]


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4, momentum=None)
    ).double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(sum(SIZES), 3, 5, dtype=torch.float64, generator=generator) * 2 + 1


def train(model: Any, run: Callable[..., torch.Tensor], part: slice) -> Tensors:
    for step in range(STEPS):
        run(model, batch(step)[part].requires_grad_()).square().sum().backward()
    return {n: v.clone() for n, v in model.named_buffers()}


def track_with_gradients_only(model: nn.Module) -> nn.Module:
    """Do what checkpoint_wrapper of fairscale does."""

    def before(layer: Any, _: object) -> None:
        if not torch.is_grad_enabled():
            layer.kept, layer.track_running_stats = layer.track_running_stats, False

    def after(layer: Any, *_: object) -> None:
        if not torch.is_grad_enabled():
            layer.track_running_stats = layer.kept

    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after)
    return model


def halve_momentum(model: Any) -> None:
    """Do what checkpoint() of pytorch-pfn-extras does: two updates are then like one."""
    for module in model.modules():
        if not hasattr(module, "_bn_momentum_patched"):
            if isinstance(module, _BatchNorm) and module.momentum is not None:
                module.momentum = 1 - (1 - module.momentum) ** 0.5
            module._bn_momentum_patched = True


def run_checkpointed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = checkpoint(model, x, use_reentrant=True)
    return y


def run_with_momentum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    halve_momentum(model)
    return run_checkpointed(model, x)


def run_pieces(model: Any, x: torch.Tensor) -> torch.Tensor:
    return run_checkpointed(model[2:], run_checkpointed(model[:2], x))


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[..., torch.Tensor], str]] = {
    "wrapped": (track_with_gradients_only, run_checkpointed, "after"),
    "wrapped before": (track_with_gradients_only, run_checkpointed, "before"),
    "in pieces": (track_with_gradients_only, run_pieces, "after"),
    "momentum": (lambda model: model, run_with_momentum, "after"),
}


def train_rank(way: str, scope: str, sizes: tuple[int, ...]) -> Tensors:
    wrap, run, when = WAYS[way]
    model = network()
    if when == "before":
        model = normscope.convert(wrap(model), scope)
    else:
        model = wrap(normscope.convert(model, scope))
    return train(model, run, split_of(sizes, distributed.get_rank()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scope", ["local", "world"])
def test_statistics_are_updated_once(ranks: RankPool, way: str, scope: str) -> None:
    sizes = SIZES if scope == "world" else (sum(SIZES),)
    expected = train(network(), lambda model, x: model(x), slice(None))

    for got in ranks.run(len(sizes), train_rank, way, scope, sizes):
        for name, value in expected.items():
            allowed = RELATIVE * value.abs().amax().item()
            torch.testing.assert_close(got[name], value, rtol=0, atol=allowed, msg=name)


def test_elements_are_counted_once() -> None:
    layer: Any = track_with_gradients_only(normscope.BatchNorm1d(3, scope="local"))
    x = torch.randn(4, 3, requires_grad=True)

    y = run_checkpointed(layer, x)
    assert layer.elements_seen == 0
    y.sum().backward()

    assert layer.elements_seen == 12
    assert layer.num_batches_tracked == 1


def run_untracked(layer: nn.Module) -> None:
    """Run the layer without gradients and statistics, outside of a checkpoint."""
    layer.track_running_stats = False  # type: ignore[assignment]
    with torch.no_grad():
        layer(torch.randn(4, 3))
    layer.track_running_stats = True  # type: ignore[assignment]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("after", ["the block", "another node"])
def test_a_recomputation_of_a_forward_that_was_tracked_updates_nothing(
    after: str, *, reentrant: bool
) -> None:
    layer: Any = normscope.BatchNorm1d(3, scope="local")
    x = torch.randn(4, 3, requires_grad=True)
    y = checkpoint(nn.Sequential(layer, nn.ReLU()), x, use_reentrant=reentrant)
    if after == "another node":
        y = y * 2

    run_untracked(layer)
    with unchanged(layer):
        y.sum().backward()

    assert layer.num_batches_tracked == 1


# Each thread numbers the nodes of its autograd graphs anew.
def test_untracked_forwards_of_another_thread_are_not_recomputed() -> None:
    layer: Any = normscope.BatchNorm1d(3, scope="local")

    def run_some() -> None:
        for _ in range(40):
            torch.ones(1, requires_grad=True) * 2
            run_untracked(layer)

    def train_some() -> None:
        for _ in range(8):
            x = torch.randn(4, 3, requires_grad=True)
            checkpoint(layer, x, use_reentrant=False).sum().backward()

    for run in (run_some, train_some):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(run).result()

    assert layer.num_batches_tracked == 8
