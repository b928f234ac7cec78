# SPDX-License-Identifier: Apache-2.0
"""Programs that combine features have the results of one process in float64.

A program is a training step of two layers on several ranks. The reference joins the norm batches of
all ranks in one process, with operations of torch alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gpu_ranks
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
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

LAYERS = ("first", "second")
MODELS = ("", "twin ")  # beginnings of the names of their results
CHECKPOINTS = ("none", "reentrant", "non-reentrant", "with context")


# Views of x [N, C, L] that skip elements, or have them in another order.
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "every other channel": lambda x: torch.stack([x, x], 2)[:, :, 0],
    "every other position": lambda x: torch.stack([x, x], 3)[..., 0],
    "channels last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "samples last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


@dataclass(frozen=True)
class Program:
    """A training step; of the samples, micro-batch m of rank r has ``sizes[m][r]``."""

    sizes: tuple[tuple[int, ...], ...]
    scopes: tuple[str, str]  # of the first and the second layer
    later_scopes: tuple[str, str]  # from the second micro-batch on, by a schedule
    seed: int
    accumulates: bool = False
    masked: bool = False
    checkpoint: str = "none"
    fused: bool = False
    shared: bool = False  # whether the second layer is the first
    frozen: bool = False  # whether the first layer's parameters need no gradient
    copied: bool = False
    rescoped: bool = False  # whether the scopes change between a forward and its backward
    twice: bool = False  # whether the gradient is differentiated
    compiled: bool = False
    mixed: bool = False  # whether it trains in mixed precision
    twin: bool = False  # whether a copy of the model, with batch statistics too, runs after it
    elsewhere: bool = False  # whether the default device is another one
    threaded: bool = False  # whether every step runs in a thread of its own
    strides: str = "dense"  # of x

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.sizes[0])

    def inputs(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x, the gradient of y and the mask, for a micro-batch of a rank."""
        generator = torch.Generator("cpu").manual_seed(1000 * self.seed + 10 * step + rank)
        shape = (self.sizes[step][rank], CHANNELS, LENGTH)
        kind: Any = {"generator": generator, "device": "cpu", "dtype": torch.float64}
        x = torch.randn(shape, **kind) * 2 + 3
        dy = torch.randn(shape, **kind)
        mask = torch.rand((shape[0], 1, LENGTH), **kind) < 0.7
        mask[..., :2] = True  # every sample keeps two values
        return x, dy, mask

    def scopes_at(self, step: int) -> tuple[str, str]:
        """Return the scopes of the layers in a micro-batch."""
        return self.later_scopes if step else self.scopes


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(1, 3))
    steps = draw(st.integers(1, 2))
    size = st.integers(0, 4)
    sizes = draw(st.tuples(*[st.tuples(*[size] * ranks)] * steps))
    scope = st.sampled_from(["world", "local", "slices:2", "group:2"])
    scopes = (draw(scope), draw(scope))
    later_scopes = (draw(scope), draw(scope)) if draw(st.booleans()) else scopes
    shared = draw(st.booleans())
    compiled = draw(st.integers(0, 9)) == 9  # it takes seconds
    mixed = draw(st.booleans())
    # Neither the gradients of compiled graphs nor those of reentrant checkpoints can be
    # differentiated, and bfloat16 is too coarse for it.
    twice = draw(st.booleans()) and not compiled and not mixed
    checkpoint = draw(st.sampled_from([c for c in CHECKPOINTS if not twice or c == "none"]))
    return Program(
        sizes=sizes,
        scopes=(scopes[0], scopes[0]) if shared else scopes,
        later_scopes=(later_scopes[0], later_scopes[0]) if shared else later_scopes,
        accumulates=draw(st.booleans()),
        masked=draw(st.booleans()),
        checkpoint=checkpoint,
        # An activation's gradient depends on the sign of values that bfloat16 rounds.
        fused=draw(st.booleans()) and not mixed,
        shared=shared,
        frozen=draw(st.booleans()),
        copied=draw(st.booleans()),
        # The recomputation of a compiled layer would raise.
        rescoped=draw(st.booleans()) and not (compiled and checkpoint != "none"),
        twice=twice,
        compiled=compiled,
        mixed=mixed,
        twin=draw(st.booleans()),
        elsewhere=draw(st.booleans()),
        threaded=draw(st.booleans()),
        strides=draw(st.sampled_from(list(STRIDES))),
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
        # Zeros, with gradients of zero if a norm batch is empty.
        ys = [0 * (x + (self.weight + self.bias)[:, None]) for x in xs]
        seen: list[list[torch.Tensor]] = [[] for _ in xs]
        for batch in self.norm_batches(xs):
            values = [xs[r][part].transpose(1, 2)[masks[r][part].squeeze(1)] for r, part in batch]
            joined = torch.cat(values)
            if len(joined) == 0:
                continue
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
            if not seen:
                continue  # all norm batches were empty
            joined = torch.cat(seen)
            mean.lerp_(joined.mean(0), MOMENTUM)
            var.lerp_(joined.var(0), MOMENTUM)
        self.seen = []


def parameters_of(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.linspace(0.5, 1.5, CHANNELS, dtype=torch.float64) + index
    return weight, torch.linspace(-1, 1, CHANNELS, dtype=torch.float64)


def layers_of(program: Program) -> list[Layer]:
    """Return the layers of one model, in the order of their use; a shared one stands twice."""
    layers = []
    for index, scope in enumerate(program.scopes):
        weight, bias = parameters_of(index)
        running = [
            [torch.zeros(CHANNELS).double(), torch.ones(CHANNELS).double()]
            for _ in range(program.ranks)
        ]
        layers.append(Layer(scope, weight.requires_grad_(), bias.requires_grad_(), running))
    return [layers[0], layers[0]] if program.shared else layers


def of_one_process(program: Program) -> list[Tensors]:
    """Return each rank's results."""
    models = [layers_of(program) for _ in range(1 + program.twin)]
    results: list[Tensors] = [{} for _ in range(program.ranks)]
    for step in range(len(program.sizes)):
        inputs = [program.inputs(step, rank) for rank in range(program.ranks)]
        xs = [x.requires_grad_() for x, _, _ in inputs]
        masks = [m if program.masked else torch.ones_like(m) for _, _, m in inputs]
        all_ys = [run_layers(program, layers, step, xs, masks) for layers in models]
        losses = [(y * dy).sum() for y, (_, dy, _) in zip(all_ys[0], inputs, strict=True)]
        loss = torch.stack(losses).sum()
        if program.twice:
            gradients = torch.autograd.grad(loss, xs, create_graph=True)
            loss = loss + torch.cat(gradients).square().sum()
        loss.backward()
        for rank, (result, x) in enumerate(zip(results, xs, strict=True)):
            assert x.grad is not None
            result[f"dx{step}"] = x.grad
            for name, ys in zip(MODELS, all_ys, strict=False):
                result[f"{name}y{step}"] = ys[rank].detach()
    for name, layers in zip(MODELS, models, strict=False):
        for index, layer in enumerate(layers[: 1 if program.shared else 2]):
            if program.accumulates:
                layer.update()
            for rank, result in enumerate(results):
                key = f"{name}{index}"
                result[f"{key}.mean"], result[f"{key}.var"] = layer.running[rank]
                # Of all ranks, because each has its own share.
                if layer.weight.grad is not None and not (program.frozen and index == 0):
                    result[f"{key}.dweight"] = layer.weight.grad
    return results


def run_layers(
    program: Program,
    layers: list[Layer],
    step: int,
    xs: list[torch.Tensor],
    masks: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Run a model on the inputs of all ranks."""
    for index, (layer, scope) in enumerate(zip(layers, program.scopes_at(step), strict=True)):
        layer.scope = scope
        ys = layer.forward(xs if index == 0 else [h * 2 + 1 for h in xs], masks)
        if not program.accumulates:
            layer.update()
        xs = ys if program.mixed else [y.relu() for y in ys]
    return xs


class Network(torch.nn.Module):
    """The same two layers, by normscope."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        kind: Any = normscope.BatchNorm1d
        if program.fused:
            kind = partial(normscope.BatchNormAct1d, activation="relu")
        without_relu = program.fused or program.mixed
        self.after = torch.nn.Identity() if without_relu else torch.nn.ReLU()
        dtype = torch.float32 if program.mixed else torch.float64
        layers = []
        for index, scope in enumerate(program.scopes):
            layer = kind(CHANNELS, momentum=MOMENTUM, scope=scope, dtype=dtype)
            weight, bias = parameters_of(index)
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(bias)
            layers.append(layer)
        self.first, self.second = layers[0], layers[0] if program.shared else layers[1]
        for parameter in self.first.parameters() if program.frozen else ():
            parameter.requires_grad_(requires_grad=False)
        # 2 h + 1, in bfloat16 if in mixed precision
        self.between = torch.nn.Conv1d(CHANNELS, CHANNELS, 1, dtype=dtype).requires_grad_(
            requires_grad=False
        )
        self.between.weight.data.copy_(2 * torch.eye(CHANNELS)[..., None])
        self.between.bias.data.fill_(1)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = self.after(self.first(x, mask=mask))
        y: torch.Tensor = self.after(self.second(self.between(hidden), mask=mask))
        return y


def run_network(network: Any, how: str, *inputs: Any) -> Any:  # noqa: ANN401
    if how == "none":
        return network(*inputs)
    if how == "with context":
        context = normscope.checkpoint_context
        return checkpoint(network, *inputs, use_reentrant=False, context_fn=context)
    return checkpoint(network, *inputs, use_reentrant=how == "reentrant")


def train_rank(program: Program, kind: str) -> Tensors:
    rank = distributed.get_rank()
    # Another thread has another current GPU.
    device = f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind
    student = Network(program).to(device)
    if program.copied:
        student = copy.deepcopy(student)
    networks = [student, copy.deepcopy(student)] if program.twin else [student]
    schedules = [
        normscope.ProgressiveScope(network, scopes, [0, 1], include=layer)
        for network in networks
        for layer, *scopes in zip(LAYERS, program.scopes, program.later_scopes, strict=True)
        if not (program.shared and layer == "second")
    ]
    callables = [torch.compile(n, backend="aot_eager") if program.compiled else n for n in networks]
    result: Tensors = {}
    with ExitStack() as blocks:
        for network in networks if program.accumulates else ():
            blocks.enter_context(normscope.accumulate(network))
        if program.elsewhere:
            blocks.enter_context(torch.device("meta"))

        def step_of(step: int) -> None:
            x, dy, mask = (tensor.to(device) for tensor in program.inputs(step, rank))
            x = STRIDES[program.strides](x.float() if program.mixed else x).requires_grad_()
            inputs = x, mask if program.masked else None
            with torch.autocast(kind, torch.bfloat16, enabled=program.mixed):
                y = run_network(callables[0], program.checkpoint, *inputs)
                for twin in callables[1:]:
                    with torch.no_grad():
                        result[f"twin y{step}"] = twin(*inputs)
            if program.rescoped:
                normscope.set_scope(student, "local")
            loss = (y * dy).sum()
            if program.twice:
                (g,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = loss + g.square().sum()
            loss.backward()
            assert x.grad is not None
            result.update({f"dx{step}": x.grad, f"y{step}": y.detach()})

        for step in range(len(program.sizes)):
            if program.threaded:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(step_of, step).result()
            else:
                step_of(step)
            if program.rescoped:
                student.first.scope, student.second.scope = program.scopes_at(step)
            for schedule in schedules:
                schedule.step()
    for name, network in zip(MODELS, networks, strict=False):
        for index, layer in enumerate(dict.fromkeys([network.first, network.second])):
            key = f"{name}{index}"
            assert layer.running_mean is not None
            assert layer.running_var is not None
            result[f"{key}.mean"], result[f"{key}.var"] = layer.running_mean, layer.running_var
            if layer.weight.grad is not None:
                distributed.all_reduce(layer.weight.grad)
                result[f"{key}.dweight"] = layer.weight.grad
    if program.compiled:
        torch.compiler.reset()
    return {name: value.cpu() for name, value in result.items()}


def check(ranks: RankPool, program: Program, device: str = "cpu") -> None:
    expected = of_one_process(program)

    answers = ranks.run(program.ranks, train_rank, program, device)

    for got, of_rank in zip(answers, expected, strict=True):
        assert got.keys() == of_rank.keys()
        for name, value in of_rank.items():
            # In mixed precision, a sum over the samples has the errors of all of them.
            mixed = 0.5 if name.endswith("dweight") else 0.1
            tolerance = mixed if program.mixed else 1e-8
            if value.numel() == 0:
                assert got[name].shape == value.shape
                continue
            error = (got[name].double() - value).abs().max()
            assert error <= tolerance * (1 + value.abs().max()), name


SETTINGS = settings(
    deadline=None,
    derandomize=True,
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# A mask breaks the graph, and batches of another size make a rank trace the layer again.
# Each trace used to number it anew.
TRACED_AGAIN = Program(
    sizes=((3, 2), (3, 4)),
    scopes=("slices:2", "slices:2"),
    later_scopes=("world", "world"),
    seed=6,
    accumulates=True,
    masked=True,
    shared=True,
    compiled=True,
)


@SETTINGS
@example(program=TRACED_AGAIN)
@given(program=programs())
def test_programs_have_the_results_of_one_process(ranks: RankPool, program: Program) -> None:
    check(ranks, program)


@pytest.mark.slow
@settings(SETTINGS, max_examples=300)
@given(program=programs())
def test_many_programs_have_the_results_of_one_process(ranks: RankPool, program: Program) -> None:
    check(ranks, program)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuda: no device")
@pytest.mark.parametrize("kernels", ["", "torch"])  # the library's own if they are built
@pytest.mark.parametrize(
    ("backend", "examples"), [("gloo", 12), pytest.param("nccl", 8, marks=pytest.mark.nccl)]
)
def test_programs_on_gpus_have_the_results_of_one_process(
    kernels: str, backend: str, examples: int
) -> None:
    if backend == "nccl" and (reason := gpu_ranks.reason_here(2)) is not None:
        pytest.skip(reason)
    pool = RankPool(environment={"NORMSCOPE_DEVICE_KERNELS": kernels}, backend=backend)
    most = 3 if backend == "gloo" else gpu_ranks.most_here()

    @settings(SETTINGS, max_examples=examples)
    @given(program=programs().filter(lambda program: program.ranks <= most))
    def check_on_gpu(program: Program) -> None:
        check(pool, program, "cuda")

    check_on_gpu()
    pool.close()
