# SPDX-License-Identifier: Apache-2.0
"""Training programs by normscope, on each of their ranks."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch_device
from oracle import ACTIVATED, OURS
from replicas import replicas_of, run_replicas
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint
from training_programs import (
    ACTIVATIONS,
    CHANNELS,
    MODELS,
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
            layers.append(layer)
        self.first, self.second = layers[0], layers[0] if program.shared else layers[1]
        self.between = convolution_of(program) if program.mixed else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = self.normalized(self.first, x, mask)
        hidden = hidden * 2 + 1 if self.between is None else self.between(hidden)
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


def run_network(network: Any, how: str, *inputs: Any) -> Any:
    if how == "none":
        return network(*inputs)
    if how == "with context":
        context = normscope.checkpoint_context
        return checkpoint(network, *inputs, use_reentrant=False, context_fn=context)
    return checkpoint(network, *inputs, use_reentrant=how == "reentrant")


def run_in_replicas(
    network: Network, sizes: tuple[int, ...], x: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    masks = [None] * len(sizes) if mask is None else mask.split(sizes)
    parts = list(zip(x.split(sizes), masks, strict=True))
    replicas = [lambda part, f=f: f(*part) for f in replicas_of(network, len(sizes))]
    outputs = run_replicas(replicas, parts)
    assert all(isinstance(y, torch.Tensor) for y in outputs), outputs
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


def evaluated(program: Program, network: Network, run: Any, device: str) -> torch.Tensor:
    """Return the output of the last micro-batch in evaluation, when ``run`` calls the network."""
    x, _, mask = inputs_of(program, len(program.sizes) - 1, device)
    network.eval()
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=program.mixed):
        y: torch.Tensor = run(x, mask)
    return y


def train_rank(program: Program, kind: str, backend: str | None = None) -> Tensors:
    """Train on a kind of device, over a group of its own if a backend is given."""
    if kind == torch_device.NAME:
        torch_device.load()
    # Another thread has another current GPU.
    device = f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind
    student = Network(program).to(device)
    if backend is not None:
        group = distributed.new_group(backend=backend)
        student.first.process_group = student.second.process_group = group
    if program.copied:
        student = copy.deepcopy(student)
    networks = [student, copy.deepcopy(student)] if program.twin else [student]
    schedules = [
        normscope.ProgressiveScope(network, scopes, [0, 1], include=layer)
        for network in networks
        for layer, *scopes in zip(LAYERS, program.scopes, program.later_scopes, strict=True)
        if not (program.shared and layer == "second")
    ]
    callables: list[Any] = networks
    if program.compiled:
        callables = [torch.compile(network, backend="aot_eager") for network in networks]
    if program.replicas:
        callables = [partial(run_in_replicas, network) for network in networks]
    result: Tensors = {}
    before = normscope.training.communication_counters().calls
    with ExitStack() as blocks:
        for network in networks if program.accumulates else ():
            blocks.enter_context(normscope.accumulate(network))
        if program.elsewhere:
            blocks.enter_context(torch.device("meta"))
            blocks.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.bfloat16)

        def step_of(step: int) -> None:
            x, dy, mask = inputs_of(program, step, device)
            x, dy = x.requires_grad_(), dy.requires_grad_()
            inputs: Any = x, mask
            if program.replicas:
                inputs = program.sizes[step], *inputs
            with torch.autocast(kind, torch.bfloat16, enabled=program.mixed):
                y = run_network(callables[0], program.checkpoint, *inputs)
                for twin in callables[1:]:
                    with torch.no_grad():
                        result[f"twin y{step}"] = twin(*inputs)
            if program.rescoped:
                normscope.set_scope(student, "local")
            loss = (y * dy).sum()
            if program.twice:
                parameters = [p for p in student.parameters() if p.requires_grad]
                loss = loss + squared_gradients(loss, [x, *parameters])
            loss.backward()
            assert x.grad is not None
            assert dy.grad is not None
            result.update({f"dx{step}": x.grad, f"ddy{step}": dy.grad, f"y{step}": y.detach()})

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
    if program.tracks:
        run = student if program.replicas else callables[0]
        result["evaluated"] = evaluated(program, student, run, device)
    for name, network in zip(MODELS, networks, strict=False):
        for index, layer in enumerate(dict.fromkeys([network.first, network.second])):
            key = f"{name}{index}"
            if program.tracks:
                running = zip(("mean", "var", "count"), layer.buffers(), strict=True)
                result.update({f"{key}.{what}": value for what, value in running})
            if program.counts_elements:
                result[f"{key}.elements"] = torch.tensor(layer.elements_seen)
            for what, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    result[f"{key}.d{what}"] = parameter.grad
    calls = normscope.training.communication_counters().calls - before
    if not program.twice:
        result["exchanges"] = torch.tensor(calls)
    if program.compiled:
        torch.compiler.reset()
    return {name: value.cpu() for name, value in result.items()}
