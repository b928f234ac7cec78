# SPDX-License-Identifier: Apache-2.0
"""Training programs by normscope, on each of their ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch_device
from oracle import ACTIVATED, OURS
from rank_pool import connected_group
from replicas import replicas_of, run_replicas
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint
from training_programs import (
    ACTIVATIONS,
    BUFFERS,
    CHANNELS,
    MODELS,
    REENTRANT,
    RESIDUALS,
    STRIDES,
    Program,
    Tensors,
    parameters_of,
    squared_gradients,
)

import normscope

LAYERS = ("first", "second")

CONVOLUTIONS: dict[int, Any] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


class Network(torch.nn.Module):
    """The same two layers, by normscope."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        kind: Any = OURS[program.dims]
        if program.fused:
            activation: Any = program.activation
            kind = partial(
                ACTIVATED[program.dims], activation=activation, negative_slope=program.slope
            )
        self.after = ACTIVATIONS["none"] if program.fused else program.activate
        self.residual = RESIDUALS[program.residual]
        self.checkpoint = program.inner
        dtype = torch.float64 if program.dtype == "float64" else torch.float32
        layers = []
        for index, scope in enumerate(program.scopes):
            layer = kind(
                CHANNELS,
                eps=program.eps,
                momentum=program.momentum,
                track_running_stats=program.tracks,
                scope=scope,
                dtype=dtype,
                slice_stats=program.slice_stats,
            )
            for name, value in parameters_of(program, index).items():
                if name in program.parameters:
                    getattr(layer, name).data.copy_(value)
                    getattr(layer, name).requires_grad_(not program.is_frozen(index))
                else:
                    layer.register_parameter(name, None)
            for name, buffer in list(layer.named_buffers()):
                setattr(layer, name, BUFFERS[program.buffers](buffer))
            if program.named:
                layer.layer_name = LAYERS[index]
            layers.append(layer)
        self.first, self.second = layers[0], layers[0] if program.shared else layers[1]
        self.between = convolution_of(program) if program.mixed else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        how = self.checkpoint if torch.is_grad_enabled() else "none"
        hidden = run_checkpointed(self.begin, how, x, mask)
        y: torch.Tensor = run_checkpointed(self.end, how, hidden, mask)
        return y

    def begin(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = self.normalized(self.first, x, mask)
        if self.between is None:
            return hidden * 2 + 1
        y: torch.Tensor = self.between(hidden)
        return y

    def end(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.normalized(self.second, hidden, mask)

    def normalized(self, layer: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        residual = self.residual(x)
        if isinstance(layer, normscope.BatchNormAct):
            y: torch.Tensor = layer(x, residual, mask=mask)
            return y
        y = layer(x, mask=mask)
        if residual is not None:
            y = y + (residual if mask is None else torch.where(mask, residual, 0.0))
        return self.after(y)


def convolution_of(program: Program) -> torch.nn.Module:
    """Return 2 h + 1, in bfloat16 under autocast."""
    size = (1,) if program.extent else ()
    layer = CONVOLUTIONS[program.dims](CHANNELS, CHANNELS, *size).requires_grad_(
        requires_grad=False
    )
    layer.weight.data.copy_(2 * torch.eye(CHANNELS).view_as(layer.weight))
    layer.bias.data.fill_(1)
    module: torch.nn.Module = layer
    return module


def run_checkpointed(function: Any, how: str, *inputs: Any) -> Any:
    if how == "none":
        return function(*inputs)
    if how == "with context":
        context = normscope.checkpoint_context
        return checkpoint(function, *inputs, use_reentrant=False, context_fn=context)
    return checkpoint(function, *inputs, use_reentrant=how in REENTRANT)


def track_with_gradients_only(*layers: Any) -> None:
    """Do what checkpoint_wrapper of fairscale does."""

    def before(layer: Any, _: object) -> None:
        if not torch.is_grad_enabled():
            layer.kept, layer.track_running_stats = layer.track_running_stats, False

    def after(layer: Any, *_: object) -> None:
        if not torch.is_grad_enabled():
            layer.track_running_stats = layer.kept

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def run_in_replicas(
    network: Network, sizes: tuple[int, ...], x: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    masks = [None] * len(sizes) if mask is None else mask.split(sizes)
    parts = list(zip(x.split(sizes), masks, strict=True))
    replicas = [lambda part, f=f: f(*part) for f in replicas_of(network, len(sizes))]
    outputs = run_replicas(replicas, parts)
    assert all(isinstance(y, torch.Tensor) for y in outputs), outputs
    with torch.autocast(x.device.type, enabled=False):  # which joins not every dtype
        return torch.cat(outputs)


def inputs_of(
    program: Program, step: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return x, the gradient of y and the mask, if there is one, for a micro-batch of this rank."""
    rank = distributed.get_rank()
    x, dy, mask = (tensor.to(device) for tensor in program.inputs(step, rank))
    if program.masked:
        x = torch.where(mask, x, torch.nan)
    return STRIDES[program.strides](x), dy, mask if program.masked else None


def autocast_of(program: Program, kind: str) -> torch.autocast:
    dtype = None if program.autocast == "none" else getattr(torch, program.autocast)
    return torch.autocast(kind, dtype, enabled=dtype is not None)


def graphs_of_autograd(program: Program) -> AbstractContextManager[object]:
    if not program.compiled_backward:
        return nullcontext()
    from torch._dynamo import compiled_autograd  # whose import takes seconds

    return compiled_autograd._enable(torch.compile(backend="eager"))


def run_in_thread(program: Program, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, in a thread of its own if the program wants that."""
    if not program.threaded:
        return function(*arguments)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def evaluated(program: Program, network: Network, run: Any, device: str) -> torch.Tensor:
    """Return the output of the last micro-batch in evaluation, when ``run`` calls the network."""
    x, _, mask = inputs_of(program, len(program.sizes) - 1, device)
    network.eval()
    with torch.no_grad(), autocast_of(program, x.device.type):
        y: torch.Tensor = run(x, mask)
    return y


def layouts_of(network: Network) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and the strides of each buffer."""
    return [(buffer.dtype, buffer.stride()) for buffer in network.buffers()]


def results_of_steps(
    program: Program,
    student: Network,
    callables: list[Any],
    schedules: list[normscope.ProgressiveScope],
    device: str,
) -> Tensors:
    """Run the student, and its twin if there is one, by these callables; return y and gradients."""
    rank = distributed.get_rank()
    result: Tensors = {}

    def forward(step: int) -> tuple[torch.Tensor, ...]:
        x, dy, mask = inputs_of(program, step, device)
        x.requires_grad_(not program.is_detached(rank))
        dy.requires_grad_()
        inputs: Any = x, mask
        if program.replicas:
            inputs = program.sizes[step], *inputs
        with autocast_of(program, x.device.type):
            y = run_checkpointed(callables[0], program.checkpoint, *inputs)
            for twin in callables[1:]:
                with torch.no_grad():
                    result[f"twin y{step}"] = twin(*inputs)
        return x, dy, y

    def loss_of(x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (y * dy).sum()
        if program.twice:
            leaves = [leaf for leaf in (x, *student.parameters()) if leaf.requires_grad]
            loss = loss + squared_gradients(loss, leaves)
        return loss

    def backward(steps: Sequence[int]) -> None:
        loss = torch.stack([loss_of(*forwards[step]) for step in steps]).sum()
        with graphs_of_autograd(program):
            loss.backward()
        for step in steps:
            x, dy, y = forwards[step]
            assert dy.grad is not None
            result.update({f"ddy{step}": dy.grad, f"y{step}": y.detach()})
            if x.requires_grad:
                assert x.grad is not None
                result[f"dx{step}"] = x.grad

    forwards = []
    for step in range(len(program.sizes)):
        forwards.append(run_in_thread(program, forward, step))
        if program.rescoped:
            run_in_thread(program, normscope.set_scope, student, "local")
        if program.order == "in turn":
            run_in_thread(program, backward, [step])
        if program.rescoped:
            student.first.scope, student.second.scope = program.scopes_at(step)
        for schedule in schedules:
            schedule.step()
    all_steps = range(len(forwards))
    if program.order == "together":
        run_in_thread(program, backward, all_steps)
    elif program.order == "reversed":
        for step in reversed(all_steps):
            run_in_thread(program, backward, [step])
    return result


def train_rank(program: Program, kind: str, backend: str | None = None) -> Tensors:
    """Train on a kind of device, over a group of its own if a backend is given."""
    if kind == torch_device.NAME:
        torch_device.load()
    rank = distributed.get_rank()
    # Another thread has another current GPU.
    device = f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind
    student = Network(program).to(device)
    if backend is not None:
        group = connected_group(range(program.ranks), backend)
        student.first.process_group = student.second.process_group = group
    if program.copied:
        student = copy.deepcopy(student)
    buffers = layouts_of(student)
    networks = [student, copy.deepcopy(student)] if program.twin else [student]
    if "late tracking" in (program.checkpoint, program.inner):
        track_with_gradients_only(*{student.first, student.second})
    schedules = [
        normscope.ProgressiveScope(network, scopes, [0, 1], include=layer)
        for network in networks
        for layer, *scopes in zip(LAYERS, program.scopes, program.later_scopes, strict=True)
        if not (program.shared and layer == "second")
    ]
    callables: list[Any] = networks
    if program.compiles(rank):
        callables = [torch.compile(network, backend="aot_eager") for network in networks]
    if program.replicas:
        callables = [partial(run_in_replicas, network) for network in networks]
    before = normscope.training.communication_counters().calls
    with ExitStack() as blocks:
        for network in networks if program.accumulates else ():
            blocks.enter_context(normscope.accumulate(network))
        if program.elsewhere:
            blocks.enter_context(torch.device("meta"))
            blocks.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.bfloat16)

        result = results_of_steps(program, student, callables, schedules, device)
    if program.tracks:
        run = student if program.replicas else callables[0]
        result["evaluated"] = evaluated(program, student, run, device)
    for name, network in zip(MODELS, networks, strict=False):
        for index, layer in enumerate(dict.fromkeys([network.first, network.second])):
            key = f"{name}{index}"
            if program.tracks:
                running = zip(("mean", "var", "count"), layer.buffers(), strict=True)
                result.update({f"{key}.{what}": value for what, value in running})
            if program.counts_elements(rank):
                result[f"{key}.elements"] = torch.tensor(layer.elements_seen)
            for what, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    result[f"{key}.d{what}"] = parameter.grad
    assert layouts_of(student) == buffers
    calls = normscope.training.communication_counters().calls - before
    if program.knows_exchanges:
        result["exchanges"] = torch.tensor(calls)
    if program.compiled or program.compiled_backward:
        torch.compiler.reset()
    return {name: value.cpu() for name, value in result.items()}
