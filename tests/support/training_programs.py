# SPDX-License-Identifier: Apache-2.0
"""Programs that combine features: a training step of two layers on several ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from rank_pool import KERNELS, split_of
from torch.nn import functional

from normscope.layers import SliceStats

CHANNELS = 3
SLOPES = (0.3, -0.5)  # of leaky_relu

Tensors = dict[str, torch.Tensor]

MODELS = ("", "twin ")  # beginnings of the names of their results
# As other libraries, the last of these tracks running statistics only where there are gradients.
REENTRANT = ("reentrant", "late tracking")
CHECKPOINTS = ("none", "non-reentrant", "with context", *REENTRANT)
ORDERS = ("in turn", "reversed", "together")  # of backwards: the others follow all forwards
NESTED = ("reentrant", "non-reentrant")  # those that can be in each other
NARROW = ("bfloat16", "float16")
EXTENTS = ((), (4,), (3, 2), (2, 1, 3), (0, 2))

# Views of x [N, C, *] that skip elements, or have them in another order.
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "every other channel": lambda x: torch.stack([x, x], 2)[:, :, 0],
    "every other position": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "samples last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}

# What programs put in place of a layer's buffers.
BUFFERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "usual": lambda buffer: buffer,
    "with strides": lambda buffer: torch.stack([buffer, buffer], -1)[..., 0],
    "of float32": lambda buffer: buffer.float() if buffer.dim() == 0 else buffer,
    "of int32": lambda buffer: buffer.int() if buffer.dim() == 0 else buffer,
}

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
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

PARAMETERS = (("weight", "bias"), ("weight",), ())  # of a layer


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
    buffers: str = "usual"  # a key of BUFFERS
    parameters: tuple[str, ...] = ("weight", "bias")
    slice_stats: SliceStats = "pooled"
    activation: str = "relu"
    slope: float = SLOPES[0]
    residual: str = "none"
    accumulates: bool = False
    masked: bool = False
    hidden: float = 0  # the share of samples of which the mask hides all values
    checkpoint: str = "none"  # of the model
    inner: str = "none"  # the checkpoint of each layer
    order: str = "in turn"  # of forwards and backwards
    fused: bool = False  # whether the layers have the activation
    shared: bool = False  # whether the second layer is the first
    named: bool = False  # whether the layers have names
    frozen: bool = False  # whether the first layer's parameters need no gradient
    detached: bool = False  # whether rank 0's x needs no gradient
    copied: bool = False
    rescoped: bool = False  # whether the scopes change between a forward and its backward
    twice: bool = False  # whether the gradients are differentiated
    compiled: bool = False
    eager: bool = False  # whether rank 0 is the only one that is not compiled
    compiled_backward: bool = False  # whether torch compiles the graphs of autograd
    autocast: str = "none"  # the dtype of autocast, which changes no layer
    mixed: bool = False  # whether autocast changes what lies between the layers
    twin: bool = False  # whether a copy of the model, with batch statistics too, runs after it
    elsewhere: bool = False  # whether the default device and dtype are others
    threaded: bool = False  # whether everything runs in threads of its own
    strides: str = "dense"  # of x
    transport: str = "shared memory"
    joined: bool = False  # whether one rank has the samples of all
    replicas: bool = False  # whether that rank has replicas, of torch.nn.DataParallel, for them

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 if self.joined else len(self.sizes[0])

    @property
    def activate(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The activation."""
        slope = {"negative_slope": self.slope} if self.activation == "leaky_relu" else {}
        return partial(ACTIVATIONS[self.activation], **slope)

    @property
    def plain(self) -> Program:
        """The program without what changes no bits, of one rank if all ranks share norm batches."""
        return replace(
            self,
            joined=set(self.scopes + self.later_scopes) == {"world"},
            replicas=False,
            checkpoint="none",
            inner="none",
            order="in turn",
            fused=False,
            detached=False,
            copied=False,
            rescoped=False,
            compiled=False,
            compiled_backward=False,
            autocast="none",
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

    def compiles(self, rank: int) -> bool:
        """Whether the model of a rank is compiled."""
        return self.compiled and not (self.eager and rank == 0)

    def counts_elements(self, rank: int) -> bool:
        """Whether the layers of a rank know how many elements they have seen."""
        return self.tracks and not self.compiles(rank)

    def is_detached(self, rank: int) -> bool:
        """Whether x of a rank needs no gradient."""
        return self.detached and rank == 0

    def is_frozen(self, index: int) -> bool:
        """Whether the parameters of a layer need no gradient."""
        return self.frozen and index == 0

    @property
    def knows_exchanges(self) -> bool:
        """Whether the number of exchanges follows from the program alone."""
        # Nested checkpoints recompute some layers twice, and second gradients some activations.
        is_nested = "none" not in (self.checkpoint, self.inner)
        return not (is_nested or (self.twice and self.fused))

    def exchanges(self, rank: int) -> int:
        """Return the number of collectives that a rank takes part in."""
        of_layer = 2 + self.twin  # forward and backward, and the forward of the twin
        of_layer += 2 * self.twice  # double backward, and that of y once more
        of_layer += sum(c in ("non-reentrant", *REENTRANT) for c in (self.checkpoint, self.inner))
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
def checkpoints(draw: st.DrawFn) -> tuple[str, str]:
    """Draw the checkpoints of a model and of its layers."""
    outer, inner = draw(st.sampled_from(CHECKPOINTS)), draw(st.sampled_from(CHECKPOINTS))
    can_nest = {outer, inner} <= {"none", *NESTED}
    return outer, inner if can_nest or outer == "none" else "none"


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
    precision = draw(st.sampled_from(["float64", "float64", "float32", *NARROW, "mixed"]))
    mixed = precision == "mixed" and 0 not in extent  # which torch does not convolve
    autocasts = ["bfloat16"] if mixed else ["none", *NARROW]
    dtype = "float32" if precision == "mixed" else precision
    # Neither the gradients of compiled graphs nor those of reentrant checkpoints can be
    # differentiated, and lower precision is too coarse for it.
    twice = draw(st.booleans()) and not compiled and dtype == "float64"
    checkpoint, inner = draw(st.just(("none", "none")) if twice else checkpoints())
    if compiled:
        checkpoint = "none" if checkpoint == "late tracking" else checkpoint
        inner = "none" if inner in REENTRANT else inner
    if shared and inner == "late tracking":
        inner = "none"  # the second call of the layer would be the first to update
    recomputes = (checkpoint, inner) != ("none", "none")
    if compiled and recomputes:
        sizes = sizes[:1] * steps  # torch may recompute a batch with the graph for another size
    can_compile_backward = not (compiled or twice or recomputes)
    parameters = draw(st.sampled_from([PARAMETERS[0], *PARAMETERS]))
    frozen = draw(st.booleans())
    # A layer without any gradient is refused if others have one, and so is a reentrant checkpoint.
    can_detach = len(parameters) > 0 and not frozen and not {checkpoint, inner} & {*REENTRANT}
    # The recomputation of a compiled layer would raise.
    can_change = not (compiled and recomputes)
    # In another order, this would update the running statistics in another order.
    tracks_late = "late tracking" in (checkpoint, inner)
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
        # In lower precision, no small standard deviation may amplify roundings.
        eps=draw(st.sampled_from([0.1] if dtype in NARROW else [1e-5, 0.1])),
        tracks=tracks,
        buffers=draw(st.sampled_from(list(BUFFERS))),
        parameters=parameters,
        slice_stats=draw(st.sampled_from(get_args(SliceStats))),
        activation=activation,
        slope=draw(st.sampled_from(SLOPES)),
        residual=residual if fused else "none",
        accumulates=draw(st.booleans()) and tracks,
        masked=draw(st.booleans()) and len(extent) > 0,
        hidden=draw(st.sampled_from([0, 0.4, 1])),
        checkpoint=checkpoint,
        inner=inner,
        order=draw(st.sampled_from(ORDERS)) if can_change and not tracks_late else "in turn",
        fused=fused,
        shared=shared,
        named=draw(st.booleans()),
        frozen=frozen,
        detached=draw(st.booleans()) and can_detach,
        copied=draw(st.booleans()),
        rescoped=draw(st.booleans()) and can_change,
        twice=twice,
        compiled=compiled,
        eager=draw(st.booleans()),
        compiled_backward=can_compile_backward and draw(st.integers(0, 9)) == 9,
        autocast=draw(st.sampled_from(autocasts)),
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
    # torch's are the second gradients, the convolution of mixed precision, and the sums of the
    # gradients of several steps together.
    return replace(
        program,
        scopes=world if is_joined else program.scopes,
        later_scopes=world if is_joined else program.later_scopes,
        dtype=draw(st.sampled_from(["float64", "float32", *NARROW])),
        kernels="own",
        activation=draw(st.sampled_from(EXACT)),
        residual=draw(st.sampled_from(list(RESIDUALS))) if program.fused else "none",
        order="in turn" if program.order == "together" else program.order,
        checkpoint="none" if has_replicas else program.checkpoint,
        inner="none" if has_replicas else program.inner,
        twice=False,
        compiled=program.compiled and not has_replicas,
        compiled_backward=program.compiled_backward and not has_replicas,
        mixed=False,
        joined=has_replicas,
        replicas=has_replicas,
    )


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


def squared_gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> torch.Tensor:
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()
