# SPDX-License-Identifier: Apache-2.0
"""Programs that combine features: a training step of two layers on several ranks.

The reference joins the norm batches of all ranks in one process, in float64 and with operations of
torch alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from oracle import OURS
from rank_pool import KERNELS, split_of
from replicas import replicas_of, run_replicas
from torch import distributed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import normscope
from normscope.layers import SliceStats

CHANNELS = 3
SLOPE = 0.3  # of leaky_relu

Tensors = dict[str, torch.Tensor]

LAYERS = ("first", "second")
MODELS = ("", "twin ")  # beginnings of the names of their results
CHECKPOINTS = ("none", "reentrant", "non-reentrant", "with context")
EXTENTS = ((), (4,), (3, 2), (2, 1, 3), (0, 2))

# Views of x [N, C, *] that skip elements, or have them in another order.
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "every other channel": lambda x: torch.stack([x, x], 2)[:, :, 0],
    "every other position": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "samples last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "leaky_relu": partial(functional.leaky_relu, negative_slope=SLOPE),
    "silu": functional.silu,
    "hard_swish": functional.hardswish,
    "none": lambda y: y,
}
# The gradients of the others jump at values that lower precision rounds to the other side.
SMOOTH = ("silu", "none")
# SiLU contains an exponential and has no defined bits.
EXACT = ("relu", "relu6", "leaky_relu", "hard_swish")

# What a layer with an activation adds to its output, from its input.
RESIDUALS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "none": lambda _: None,
    "input": lambda x: x,
    "first channel": lambda x: x[:, :1],
}

BATCH_NORM_ACTS: dict[int, type[normscope.BatchNormAct]] = {
    2: normscope.BatchNormAct1d,
    3: normscope.BatchNormAct1d,
    4: normscope.BatchNormAct2d,
    5: normscope.BatchNormAct3d,
}
PARAMETERS = (("weight", "bias"), ("weight",), ())  # of a layer
CONVOLUTIONS: dict[int, Any] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


@dataclass(frozen=True)
class Program:
    """A training step; of the samples, micro-batch m of rank r has ``sizes[m][r]``."""

    sizes: tuple[tuple[int, ...], ...]
    scopes: tuple[str, str]  # of the first and the second layer
    later_scopes: tuple[str, str]  # from the second micro-batch on, by a schedule
    seed: int
    extent: tuple[int, ...] = (4,)  # of x [N, C, *]
    dtype: str = "float64"  # of x and the parameters
    kernels: str = "own"  # a key of KERNELS
    momentum: float | None = 0.3
    eps: float = 1e-5
    tracks: bool = True  # whether the layers have running statistics
    parameters: tuple[str, ...] = ("weight", "bias")
    slice_stats: SliceStats = "pooled"
    activation: str = "relu"
    residual: str = "none"
    accumulates: bool = False
    masked: bool = False
    hidden: float = 0  # the share of samples of which the mask hides all values
    checkpoint: str = "none"
    fused: bool = False  # whether the layers have the activation
    shared: bool = False  # whether the second layer is the first
    frozen: bool = False  # whether the first layer's parameters need no gradient
    copied: bool = False
    rescoped: bool = False  # whether the scopes change between a forward and its backward
    twice: bool = False  # whether the gradients are differentiated
    compiled: bool = False
    mixed: bool = False  # whether it trains in mixed precision
    twin: bool = False  # whether a copy of the model, with batch statistics too, runs after it
    elsewhere: bool = False  # whether the default device is another one
    threaded: bool = False  # whether every step runs in a thread of its own
    strides: str = "dense"  # of x
    transport: str = "shared memory"
    joined: bool = False  # whether one rank has the samples of all
    replicas: bool = False  # whether that rank has replicas, of torch.nn.DataParallel, for them

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 if self.joined else len(self.sizes[0])

    @property
    def plain(self) -> Program:
        """The program without what changes no bits, of one rank if all ranks share norm batches."""
        return replace(
            self,
            joined=set(self.scopes + self.later_scopes) == {"world"},
            replicas=False,
            checkpoint="none",
            fused=False,
            copied=False,
            rescoped=False,
            compiled=False,
            elsewhere=False,
            threaded=False,
            transport="shared memory",
        )

    def samples(self, step: int, rank: int) -> slice:
        """Return the samples of a rank, among those of all ranks."""
        return slice(None) if self.joined else split_of(self.sizes[step], rank)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the ranks."""
        return {"NORMSCOPE_SHARED_MEMORY": "0" if self.transport == "gloo" else "1"}

    @property
    def counts_elements(self) -> bool:
        """Whether a layer knows how many elements it has seen."""
        return self.tracks and not self.compiled

    @property
    def dims(self) -> int:
        """The number of dimensions of x."""
        return 2 + len(self.extent)

    def inputs(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x, the gradient of y and the mask, for a micro-batch of a rank."""
        generator = torch.Generator("cpu").manual_seed(1000 * self.seed + step)
        shape = (sum(self.sizes[step]), CHANNELS, *self.extent)
        kind: Any = {"generator": generator, "device": "cpu", "dtype": torch.float64}
        x = (torch.randn(shape, **kind) * 2 + 3).to(getattr(torch, self.dtype))
        dy = torch.randn(shape, **kind)
        mask = torch.rand((shape[0], 1, *self.extent), **kind) < 0.7
        # Every other sample keeps two values, if it has as many.
        mask.view(shape[0], 1, math.prod(self.extent))[..., :2] = True
        mask[torch.rand(shape[0], **kind) < self.hidden] = False
        part = self.samples(step, rank)
        return x[part], dy[part], mask[part]

    def is_frozen(self, index: int) -> bool:
        """Whether the parameters of a layer need no gradient."""
        return self.frozen and index == 0

    def exchanges(self, rank: int) -> int:
        """Return the number of collectives that a rank takes part in, if it is not twice."""
        of_layer = 2 + self.twin  # forward and backward, and the forward of the twin
        of_layer += self.checkpoint in ("reentrant", "non-reentrant")
        scopes = [scope for step in range(len(self.sizes)) for scope in self.scopes_at(step)]
        # In groups of two, the last rank may be alone.
        group = rank < self.ranks // 2 * 2
        peers = {"world": self.ranks > 1, "group:2": group}
        making_groups = self.ranks > 1 and "group:2" in scopes
        return of_layer * sum(peers.get(scope, False) for scope in scopes) + making_groups

    def scopes_at(self, step: int) -> tuple[str, str]:
        """Return the scopes of the layers in a micro-batch."""
        return self.later_scopes if step else self.scopes


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program with results that can be compared with those of one process."""
    ranks = draw(st.integers(1, 3))
    steps = draw(st.integers(1, 2))
    extent = draw(st.sampled_from(EXTENTS))
    # Of 4 samples, torch.chunk makes 2 slices, and not 3.
    kinds = ["world", "local", "slices:2", "slices:3", "group:2"]
    # A single value per channel is refused.
    scope = st.sampled_from(kinds if extent else ["world", "local", "group:2"])
    size = st.integers(0, 4) if extent else st.sampled_from([0, 2, 3, 4])
    sizes = draw(st.tuples(*[st.tuples(*[size] * ranks)] * steps))
    scopes = (draw(scope), draw(scope))
    later_scopes = (draw(scope), draw(scope)) if draw(st.booleans()) else scopes
    shared = draw(st.booleans())
    compiled = draw(st.integers(0, 19)) == 19  # it takes seconds
    precision = draw(st.sampled_from(["float64", "float64", "float32", "mixed"]))
    mixed = precision == "mixed" and 0 not in extent  # which torch does not convolve
    dtype = "float32" if precision == "mixed" else precision
    # Neither the gradients of compiled graphs nor those of reentrant checkpoints can be
    # differentiated, and lower precision is too coarse for it.
    twice = draw(st.booleans()) and not compiled and dtype == "float64"
    checkpoint = draw(st.sampled_from([c for c in CHECKPOINTS if not twice or c == "none"]))
    activation = draw(st.sampled_from(list(ACTIVATIONS) if dtype == "float64" else SMOOTH))
    # A layer with an activation, and what is added before it; or separate modules.
    residual = draw(st.sampled_from(["separate", *RESIDUALS]))
    fused = residual != "separate" and activation != "none"
    tracks = draw(st.integers(0, 9)) > 0
    return Program(
        sizes=sizes,
        scopes=(scopes[0], scopes[0]) if shared else scopes,
        later_scopes=(later_scopes[0], later_scopes[0]) if shared else later_scopes,
        extent=extent,
        dtype=dtype,
        kernels=draw(st.sampled_from(list(KERNELS))),
        momentum=draw(st.sampled_from([0.3, None])),
        eps=draw(st.sampled_from([1e-5, 0.1])),
        tracks=tracks,
        parameters=draw(st.sampled_from([PARAMETERS[0], *PARAMETERS])),
        slice_stats=draw(st.sampled_from(get_args(SliceStats))),
        activation=activation,
        residual=residual if fused else "none",
        accumulates=draw(st.booleans()) and tracks,
        masked=draw(st.booleans()) and len(extent) > 0,
        hidden=draw(st.sampled_from([0, 0.4, 1])),
        checkpoint=checkpoint,
        fused=fused,
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
        transport=draw(st.sampled_from(["shared memory", "gloo"])),
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def programs_with_bits(draw: st.DrawFn) -> Program:
    """Draw a program with the bits of its plain form."""
    program = draw(programs())
    world = ("world", "world")
    is_joined = draw(st.booleans())
    has_replicas = is_joined and draw(st.booleans())
    # The second gradients and the convolution of mixed precision are torch's.
    return replace(
        program,
        scopes=world if is_joined else program.scopes,
        later_scopes=world if is_joined else program.later_scopes,
        dtype=draw(st.sampled_from(["float64", "float32", "bfloat16", "float16"])),
        kernels="own",
        activation=draw(st.sampled_from(EXACT)),
        residual=draw(st.sampled_from(list(RESIDUALS))) if program.fused else "none",
        # The order of a sum depends on the layout, which a graph may change.
        strides="dense" if program.compiled else program.strides,
        checkpoint="none" if has_replicas else program.checkpoint,
        twice=False,
        compiled=program.compiled and not has_replicas,
        mixed=False,
        joined=has_replicas,
        replicas=has_replicas,
    )


@dataclass
class Layer:
    """A layer of all ranks, in float64."""

    program: Program
    scope: str
    parameters: list[Tensors]  # of each rank
    running: list[list[torch.Tensor]]  # mean, variance and number of updates of each rank
    seen: list[list[torch.Tensor]] = field(default_factory=list)  # rows [n, C] of each rank
    elements: list[int] = field(default_factory=list)  # of all inputs of each rank

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
        shape = (-1, *[1] * len(self.program.extent))
        affine = [[values.view(shape) for values in own.values()] for own in self.parameters]
        # Zeros, with gradients of zero if a norm batch is empty.
        ys = [0 * (x + weight + bias) for x, (weight, bias) in zip(xs, affine, strict=True)]
        seen: list[list[torch.Tensor]] = [[] for _ in xs]
        for batch in self.norm_batches(xs):
            values = [xs[r][part].movedim(1, -1)[masks[r][part][:, 0]] for r, part in batch]
            joined = torch.cat(values)
            if len(joined) == 0:
                continue
            var, mean = torch.var_mean(joined, 0, correction=0)
            inv_std = (var + self.program.eps).rsqrt()
            for r, part in batch:
                weight, bias = affine[r]
                y = (xs[r][part] - mean.view(shape)) * inv_std.view(shape) * weight + bias
                ys[r] = ys[r].clone()
                ys[r][part] = torch.where(masks[r][part], y, 0.0)
                if self.program.slice_stats != "first" or not part.start:
                    seen[r].append(joined.detach())
        before = self.seen or [[] for _ in xs]
        self.seen = [old + new for old, new in zip(before, seen, strict=True)]
        counts = [CHANNELS * int(mask.sum()) for mask in masks]
        self.elements = [a + b for a, b in zip(self.elements or [0] * len(xs), counts, strict=True)]
        return ys

    def update(self) -> None:
        """Update the running statistics of each rank with all that it has seen."""
        by_slice = self.program.slice_stats == "sequential" and not self.program.accumulates
        for (mean, var, count), seen in zip(self.running, self.seen, strict=True):
            # Nothing, if all norm batches were empty.
            for rows in seen if by_slice or not seen else [torch.cat(seen)]:
                count += 1
                momentum = self.program.momentum or 1 / count
                mean.lerp_(rows.mean(0), momentum)
                var.lerp_(rows.var(0), momentum)
        self.seen = []


def parameters_of(program: Program, index: int) -> Tensors:
    """Return the weight and the bias; without gradients those that a layer does not have."""
    weight = torch.linspace(0.5, 1.5, CHANNELS, dtype=torch.float64) + index
    bias = torch.linspace(-1, 1, CHANNELS, dtype=torch.float64)
    given = {"weight": (weight, torch.ones_like(weight)), "bias": (bias, torch.zeros_like(bias))}
    return {
        name: value.requires_grad_(not program.is_frozen(index))
        if name in program.parameters
        else otherwise
        for name, (value, otherwise) in given.items()
    }


def layers_of(program: Program) -> list[Layer]:
    """Return the layers of one model, in the order of their use; a shared one stands twice."""
    layers = []
    for index, scope in enumerate(program.scopes):
        fresh = torch.zeros(CHANNELS), torch.ones(CHANNELS), torch.zeros(())
        running = [[tensor.double() for tensor in fresh] for _ in range(program.ranks)]
        parameters = [parameters_of(program, index) for _ in range(program.ranks)]
        layers.append(Layer(program, scope, parameters, running))
    return [layers[0], layers[0]] if program.shared else layers


def of_one_process(program: Program) -> list[Tensors]:
    """Return each rank's results."""
    models = [layers_of(program) for _ in range(1 + program.twin)]
    results: list[Tensors] = [{} for _ in range(program.ranks)]
    for step in range(len(program.sizes)):
        inputs = [program.inputs(step, rank) for rank in range(program.ranks)]
        xs = [x.double().requires_grad_() for x, _, _ in inputs]
        dys = [dy.requires_grad_() for _, dy, _ in inputs]
        masks = [m if program.masked else torch.ones_like(m) for _, _, m in inputs]
        all_ys = [run_layers(program, layers, step, xs, masks) for layers in models]
        loss = torch.stack([(y * dy).sum() for y, dy in zip(all_ys[0], dys, strict=True)]).sum()
        if program.twice:
            loss = loss + squared_gradients(loss, [*xs, *trained_by(models[0])])
        loss.backward()
        for rank, (result, x, dy) in enumerate(zip(results, xs, dys, strict=True)):
            assert x.grad is not None
            assert dy.grad is not None
            result.update({f"dx{step}": x.grad, f"ddy{step}": dy.grad})
            for name, ys in zip(MODELS, all_ys, strict=False):
                result[f"{name}y{step}"] = ys[rank].detach()
    for rank, result in enumerate(results if not program.twice else ()):
        result["exchanges"] = torch.tensor(program.exchanges(rank))
    for name, layers in zip(MODELS, models, strict=False):
        for index, layer in enumerate(layers[: 1 if program.shared else 2]):
            if program.accumulates:
                layer.update()
            for rank, result in enumerate(results):
                key = f"{name}{index}"
                if program.tracks:
                    running = zip(("mean", "var", "count"), layer.running[rank], strict=True)
                    result.update({f"{key}.{what}": value for what, value in running})
                if program.counts_elements:
                    result[f"{key}.elements"] = torch.tensor(layer.elements[rank])
                for what, parameter in layer.parameters[rank].items():
                    if parameter.grad is not None:
                        result[f"{key}.d{what}"] = parameter.grad
    return results


def trained_by(layers: list[Layer]) -> list[torch.Tensor]:
    """Return the parameters of all ranks that need gradients."""
    found = [p for layer in layers for own in layer.parameters for p in own.values()]
    return list(dict.fromkeys(p for p in found if p.requires_grad))


def squared_gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


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
        given = xs if index == 0 else [h * 2 + 1 for h in xs]
        ys = layer.forward(given, masks)
        if not program.accumulates:
            layer.update()
        others = [RESIDUALS[program.residual](x) for x in given]
        sums = [y if r is None else y + r for y, r in zip(ys, others, strict=True)]
        ys = [ACTIVATIONS[program.activation](y) for y in sums]
        xs = [torch.where(mask, y, 0.0) for mask, y in zip(masks, ys, strict=True)]
    return xs


class Network(torch.nn.Module):
    """The same two layers, by normscope."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        kind: Any = OURS[program.dims]
        if program.fused:
            activation: Any = program.activation
            kind = partial(
                BATCH_NORM_ACTS[program.dims], activation=activation, negative_slope=SLOPE
            )
        self.after = ACTIVATIONS["none" if program.fused else program.activation]
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

    def normalized(
        self,
        layer: Any,  # noqa: ANN401
        x: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
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


def run_network(network: Any, how: str, *inputs: Any) -> Any:  # noqa: ANN401
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

        def step_of(step: int) -> None:
            x, dy, mask = (tensor.to(device) for tensor in program.inputs(step, rank))
            if program.masked:
                x = torch.where(mask, x, torch.nan)
            x, dy = STRIDES[program.strides](x).requires_grad_(), dy.requires_grad_()
            inputs: Any = x, mask if program.masked else None
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
