# SPDX-License-Identifier: Apache-2.0
"""Times layers, kernels and copies alternately, to expose all of them to the same noise."""

from __future__ import annotations

import copy
import ctypes
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

import normscope
from cases import Case
from kernels import Kernels, Pass

# Determines the number of calls in a sample, which should take a few milliseconds. A shorter sample
# would mainly measure the time slices of the scheduler.
ELEMENTS_PER_SAMPLE = 4_000_000
MOST_CALLS_PER_SAMPLE = 200

# Seconds per call [rounds, parts], by the name of a pass.
Samples = dict[str, torch.Tensor]

FORWARD, BACKWARD = 0, 1  # parts of a layer's pass


@dataclass(frozen=True)
class Quartiles:
    """The quartiles of a value over the rounds."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: torch.Tensor) -> Quartiles:
        """Return the quartiles of ``values``, which include the extremes."""
        return cls(*statistics.quantiles(values.tolist(), n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f}-{self.upper:.2f})"


@dataclass(frozen=True)
class Direction:
    """Forward or backward.

    Args:
        milliseconds: median time of normscope's layer.
        torch_milliseconds: median time of torch's layer.
        ratio: torch's time divided by normscope's in the same round; above 1, normscope is faster.
        copies: normscope's time divided by that of a copy of the input.
        kernel_copies: the same for the kernels alone; None if they were not measured.
        of_local: normscope's time divided by that of its layer with scope local in the same round;
            None for that layer itself.
    """

    milliseconds: float
    torch_milliseconds: float
    ratio: Quartiles
    copies: float
    kernel_copies: float | None
    of_local: Quartiles | None


@dataclass(frozen=True)
class Timing:
    """The results for one case.

    Args:
        forward: results of forward.
        backward: results of backward with respect to input, weight and bias.
        copy_milliseconds: time to copy the input into memory that is already in use.
    """

    forward: Direction
    backward: Direction
    copy_milliseconds: float


def layers_of(case: Case, scope: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return torch's layer and normscope's."""
    theirs = (torch.nn.BatchNorm1d if case.layout == "NC" else torch.nn.BatchNorm2d)(case.shape[1])
    return theirs, normscope.convert(copy.deepcopy(theirs), scope)


def passes(case: Case, scope: str, kernels: Kernels | None) -> dict[str, Pass]:
    """Return the passes to time for a row: layers, the kernels alone, and copies."""
    x, dy = case.tensor().requires_grad_(), case.tensor()
    theirs, ours = layers_of(case, scope)
    detached = x.detach()
    result = {
        "torch": module_pass(theirs, x, dy),
        "normscope": module_pass(ours, x, dy),
        **copy_passes(detached),
    }
    if scope != "local":
        result["local"] = module_pass(layers_of(case, "local")[1], x, dy)
    if kernels is not None:
        result["copy streamed"] = kernels.copy_pass(detached)
        if scope == "local":
            result["kernels"] = kernels.layer_pass(case, detached, dy)
    return result


def module_pass(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Pass:
    """Return the :func:`layer_pass` of a module."""
    return layer_pass(layer, x, dy, list(layer.parameters()))


def layer_pass(
    layer: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    dy: torch.Tensor,
    parameters: Sequence[torch.Tensor],
) -> Pass:
    """Time forward and backward of a layer, with newly allocated outputs.

    Args:
        layer: The layer to call.
        x: The input, which requires a gradient.
        dy: The gradient of the output.
        parameters: Further tensors to differentiate with respect to.
    """
    inputs = [x, *parameters]

    def forward_and_backward() -> list[float]:
        start = perf_counter()
        y = layer(x)
        middle = perf_counter()
        gradients = torch.autograd.grad(y, inputs, dy)
        end = perf_counter()
        del gradients  # kept until here, to not time its release
        return [middle - start, end - middle]

    return forward_and_backward


def copy_passes(x: torch.Tensor) -> dict[str, Pass]:
    """Return two ways to copy into memory that is already in use."""
    y = x.clone()

    def by_torch() -> list[float]:
        start = perf_counter()
        y.copy_(x)
        return [perf_counter() - start]

    def by_c_library() -> list[float]:
        start = perf_counter()
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        return [perf_counter() - start]

    return {"copy torch": by_torch, "copy C": by_c_library}


def sample(
    case: Case, passes: Mapping[str, Pass], rounds: int, align: Callable[[], None] = lambda: None
) -> Samples:
    """Run every pass once per round; each round starts with a different pass.

    Args:
        case: Determines the number of calls in a sample.
        passes: The passes to time.
        rounds: The number of rounds, after an untimed one.
        align: Called before each sample to make the ranks start together.
    """
    calls = min(MOST_CALLS_PER_SAMPLE, math.ceil(ELEMENTS_PER_SAMPLE / case.elements))
    names = list(passes)
    samples: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            align()
            parts = _mean_parts(passes[name], calls)
            if turn > 0:
                samples[name].append(parts)
    return {name: torch.tensor(parts, dtype=torch.float64) for name, parts in samples.items()}


def _mean_parts(one_pass: Pass, calls: int) -> list[float]:
    parts = zip(*(one_pass() for _ in range(calls)), strict=True)
    return [statistics.fmean(part) for part in parts]


def timing_of(samples: Samples) -> Timing:
    """Evaluate the samples of :func:`passes`."""
    copy_seconds = min(
        _median(seconds[:, 0]) for name, seconds in samples.items() if name.startswith("copy")
    )
    return Timing(
        forward=_direction(samples, FORWARD, copy_seconds),
        backward=_direction(samples, BACKWARD, copy_seconds),
        copy_milliseconds=1e3 * copy_seconds,
    )


def ratio(samples: Samples, part: int, theirs: str, ours: str) -> Quartiles:
    """Return the time of one pass divided by that of another in the same round."""
    return Quartiles.of(samples[theirs][:, part] / samples[ours][:, part])


def _median(values: torch.Tensor) -> float:
    return float(statistics.median(values.tolist()))


def _direction(samples: Samples, part: int, copy_seconds: float) -> Direction:
    seconds = {
        name: _median(values[:, part]) for name, values in samples.items() if values.shape[1] > 1
    }
    kernels = seconds.get("kernels")
    return Direction(
        milliseconds=1e3 * seconds["normscope"],
        torch_milliseconds=1e3 * seconds["torch"],
        ratio=ratio(samples, part, "torch", "normscope"),
        copies=seconds["normscope"] / copy_seconds,
        kernel_copies=None if kernels is None else kernels / copy_seconds,
        of_local=ratio(samples, part, "normscope", "local") if "local" in seconds else None,
    )
