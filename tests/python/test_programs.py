# SPDX-License-Identifier: Apache-2.0
"""Programs that combine features have the results of one process in float64.

A program is a training step of two layers on several ranks. The reference joins the norm batches of
all ranks in one process, with operations of torch alone.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import distributed
from torch.utils.checkpoint import checkpoint

import normscope

CHANNELS = 3
LENGTH = 4
MOMENTUM = 0.3
EPS = 1e-5

Tensors = dict[str, torch.Tensor]

CHECKPOINTS = ("none", "reentrant", "non-reentrant", "with context")


@dataclass(frozen=True)
class Program:
    """A training step; of the samples, micro-batch m of rank r has ``sizes[m][r]``."""

    sizes: tuple[tuple[int, ...], ...]
    scopes: tuple[str, str]  # of the first and the second layer
    accumulates: bool
    masked: bool
    checkpoint: str
    fused: bool
    shared: bool  # whether the second layer is the first
    frozen: bool  # whether the first layer's parameters need no gradient
    copied: bool
    rescoped: bool  # whether the scopes change between a forward and its backward
    twice: bool  # whether the gradient is differentiated
    seed: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.sizes[0])

    def inputs(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x, the gradient of y and the mask, for a micro-batch of a rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + rank)
        shape = (self.sizes[step][rank], CHANNELS, LENGTH)
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 3
        dy = torch.randn(shape, generator=generator, dtype=torch.float64)
        mask = torch.rand((shape[0], 1, LENGTH), generator=generator) < 0.7
        mask[..., :2] = True  # every sample keeps two values
        return x, dy, mask


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(1, 3))
    steps = draw(st.integers(1, 2))
    size = st.integers(2, 4)
    sizes = draw(st.tuples(*[st.tuples(*[size] * ranks)] * steps))
    scope = st.sampled_from(["world", "local", "slices:2", "group:2"])
    scopes = (draw(scope), draw(scope))
    shared = draw(st.booleans())
    twice = draw(st.booleans())
    masked = draw(st.booleans())
    return Program(
        sizes=sizes,
        scopes=(scopes[0], scopes[0]) if shared else scopes,
        accumulates=draw(st.booleans()),
        masked=masked,
        # A reentrant checkpoint cannot be differentiated twice.
        checkpoint=draw(st.sampled_from([c for c in CHECKPOINTS if not twice or c == "none"])),
        fused=draw(st.booleans()),
        shared=shared,
        frozen=draw(st.booleans()),
        copied=draw(st.booleans()),
        rescoped=draw(st.booleans()),
        twice=twice,
        seed=draw(st.integers(0, 9)),
    )


@dataclass
class Layer:
    """A layer of all ranks, in float64."""

    scope: str
    weight: torch.Tensor
    bias: torch.Tensor
    running: list[list[torch.Tensor]]  # mean and variance of each rank
    seen: list[list[torch.Tensor]] = field(default_factory=list)  # rows [n, C] of each rank

    def norm_batches(self, xs: list[torch.Tensor]) -> list[list[tuple[int, slice]]]:
        """Return the samples of each norm batch, as slices of ranks."""
        kind, _, count = self.scope.partition(":")
        ranks = range(len(xs))
        whole = [(rank, slice(None)) for rank in ranks]
        if kind == "world":
            return [whole]
        if kind == "group":
            return [whole[i : i + int(count)] for i in range(0, len(xs), int(count))]
        if kind == "local":
            return [[one] for one in whole]
        batches = []
        for rank in ranks:
            first = 0
            for chunk in torch.arange(len(xs[rank])).chunk(int(count)):
                batches.append([(rank, slice(first, first + len(chunk)))])
                first += len(chunk)
        return batches

    def forward(self, xs: list[torch.Tensor], masks: list[torch.Tensor]) -> list[torch.Tensor]:
        """Normalize the inputs of all ranks, and keep what updates the running statistics."""
        ys = [torch.zeros_like(x) for x in xs]
        seen: list[list[torch.Tensor]] = [[] for _ in xs]
        for batch in self.norm_batches(xs):
            values = [xs[r][part].transpose(1, 2)[masks[r][part].squeeze(1)] for r, part in batch]
            joined = torch.cat(values)
            var, mean = torch.var_mean(joined, 0, correction=0)
            scale = self.weight / (var + EPS).sqrt()
            for r, part in batch:
                y = (xs[r][part] - mean[:, None]) * scale[:, None] + self.bias[:, None]
                ys[r] = ys[r].clone()
                ys[r][part] = torch.where(masks[r][part], y, 0.0)
                seen[r].append(joined.detach())
        before = self.seen or [[] for _ in xs]
        self.seen = [old + new for old, new in zip(before, seen, strict=True)]
        return ys

    def update(self) -> None:
        """Update the running statistics of each rank once, with all that it has seen."""
        for (mean, var), seen in zip(self.running, self.seen, strict=True):
            joined = torch.cat(seen)
            mean.lerp_(joined.mean(0), MOMENTUM)
            var.lerp_(joined.var(0), MOMENTUM)
        self.seen = []


def parameters_of(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.linspace(0.5, 1.5, CHANNELS, dtype=torch.float64) + index
    return weight, torch.linspace(-1, 1, CHANNELS, dtype=torch.float64)


def of_one_process(program: Program) -> list[Tensors]:
    """Return each rank's results."""
    layers = []
    for index, scope in enumerate(program.scopes):
        weight, bias = parameters_of(index)
        running = [
            [torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double()]
            for _ in range(program.ranks)
        ]
        layers.append(Layer(scope, weight.requires_grad_(), bias.requires_grad_(), running))
    if program.shared:
        layers[1] = layers[0]
    results: list[Tensors] = [{} for _ in range(program.ranks)]
    updates: list[Layer] = [layers[0]] if program.shared else layers
    for step in range(len(program.sizes)):
        inputs = [program.inputs(step, rank) for rank in range(program.ranks)]
        xs = [x.requires_grad_() for x, _, _ in inputs]
        masks = [m if program.masked else torch.ones_like(m) for _, _, m in inputs]
        hidden = [h.relu() for h in layers[0].forward(xs, masks)]
        if not program.accumulates:
            layers[0].update()
        ys = [y.relu() for y in layers[1].forward([h * 2 + 1 for h in hidden], masks)]
        if not program.accumulates:
            layers[1].update()
        losses = [(y * dy).sum() for y, (_, dy, _) in zip(ys, inputs, strict=True)]
        loss = torch.stack(losses).sum()
        if program.twice:
            gradients = torch.autograd.grad(loss, xs, create_graph=True)
            loss = loss + torch.cat(gradients).square().sum()
        loss.backward()
        for rank, (x, y) in enumerate(zip(xs, ys, strict=True)):
            assert x.grad is not None
            results[rank] |= {f"dx{step}": x.grad, f"y{step}": y.detach()}
    for layer in updates if program.accumulates else []:
        layer.update()
    for rank, result in enumerate(results):
        for index, layer in enumerate(updates):
            result[f"{index}.mean"], result[f"{index}.var"] = layer.running[rank]
            # Of all ranks, because each has its own share.
            if layer.weight.grad is not None and not (program.frozen and index == 0):
                result[f"{index}.dweight"] = layer.weight.grad
    return results


class Network(torch.nn.Module):
    """The same two layers, by normscope."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        kind: Any = normscope.BatchNorm1d
        if program.fused:
            kind = partial(normscope.BatchNormAct1d, activation="relu")
        self.fused = program.fused
        layers = []
        for index, scope in enumerate(program.scopes):
            layer = kind(CHANNELS, momentum=MOMENTUM, scope=scope, dtype=torch.float64)
            weight, bias = parameters_of(index)
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(bias)
            layers.append(layer)
        self.first, self.second = layers[0], layers[0] if program.shared else layers[1]
        for parameter in self.first.parameters() if program.frozen else ():
            parameter.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        after = torch.nn.Identity() if self.fused else torch.nn.ReLU()
        hidden = after(self.first(x, mask=mask))
        y: torch.Tensor = after(self.second(hidden * 2 + 1, mask=mask))
        return y


def run_network(network: Network, how: str, *inputs: Any) -> Any:  # noqa: ANN401
    if how == "none":
        return network(*inputs)
    if how == "with context":
        context = normscope.checkpoint_context
        return checkpoint(network, *inputs, use_reentrant=False, context_fn=context)
    return checkpoint(network, *inputs, use_reentrant=how == "reentrant")


def train_rank(program: Program) -> Tensors:
    rank = distributed.get_rank()
    network = Network(program)
    if program.copied:
        network = copy.deepcopy(network)
    result: Tensors = {}
    block: AbstractContextManager[Any] = (
        normscope.accumulate(network) if program.accumulates else nullcontext()
    )
    with block:
        for step in range(len(program.sizes)):
            x, dy, mask = program.inputs(step, rank)
            x = x.requires_grad_()
            y = run_network(network, program.checkpoint, x, mask if program.masked else None)
            if program.rescoped:
                normscope.set_scope(network, "local")
            loss = (y * dy).sum()
            if program.twice:
                (g,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + g.square().sum()
            loss.backward()
            if program.rescoped:
                network.first.scope, network.second.scope = program.scopes
            assert x.grad is not None
            result |= {f"dx{step}": x.grad, f"y{step}": y.detach()}
    layers = [network.first] if program.shared else [network.first, network.second]
    for index, layer in enumerate(layers):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        result[f"{index}.mean"], result[f"{index}.var"] = layer.running_mean, layer.running_var
        if layer.weight.grad is not None:
            distributed.all_reduce(layer.weight.grad)
            result[f"{index}.dweight"] = layer.weight.grad
    return result


def check(ranks: RankPool, program: Program) -> None:
    expected = of_one_process(program)

    answers = ranks.run(program.ranks, train_rank, program)

    for got, of_rank in zip(answers, expected, strict=True):
        assert got.keys() == of_rank.keys()
        for name, value in of_rank.items():
            torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-8, msg=name)


SETTINGS = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@SETTINGS
@given(program=programs())
def test_programs_have_the_results_of_one_process(ranks: RankPool, program: Program) -> None:
    check(ranks, program)


@pytest.mark.slow
@settings(SETTINGS, max_examples=600)
@given(program=programs())
def test_many_programs_have_the_results_of_one_process(ranks: RankPool, program: Program) -> None:
    check(ranks, program)
