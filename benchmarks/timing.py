# SPDX-License-Identifier: Apache-2.0
"""Times torch's layer, normscope's and a copy in turn, so that all of them meet the same noise."""

from __future__ import annotations

import copy
import ctypes
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

import normscope
from cases import Case

# Calls that make up one sample: as many as take a few milliseconds, since a shorter sample would
# show the scheduler's time slices more than the layer.
ELEMENTS_PER_SAMPLE = 4_000_000
MOST_CALLS_PER_SAMPLE = 200

# Does some work once and returns how long its parts took, in seconds.
Pass = Callable[[], list[float]]


@dataclass(frozen=True)
class Quartiles:
    """How a figure varied over the rounds."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: list[float]) -> Quartiles:
        """The quartiles of ``values``, which include the extremes."""
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f}-{self.upper:.2f})"


@dataclass(frozen=True)
class Direction:
    """Forward or backward.

    Args:
        milliseconds: of normscope's layer, the median.
        torch_milliseconds: of torch's layer, the median.
        ratio: torch's time divided by normscope's in the same round; above 1, normscope is faster.
        copies: normscope's time divided by that of a copy of the input.
    """

    milliseconds: float
    torch_milliseconds: float
    ratio: Quartiles
    copies: float


@dataclass(frozen=True)
class Timing:
    """What came out for one case.

    Args:
        forward: of the layer.
        backward: with respect to input, weight and bias.
        copy_milliseconds: of a copy of the input into memory that was touched before.
    """

    forward: Direction
    backward: Direction
    copy_milliseconds: float


def passes(case: Case, scope: str) -> list[Pass]:
    """The layer of torch.nn, that of normscope and two ways to copy."""
    x, dy = case.tensor().requires_grad_(), case.tensor()
    theirs = (torch.nn.BatchNorm1d if case.layout == "NC" else torch.nn.BatchNorm2d)(case.shape[1])
    ours = normscope.convert(copy.deepcopy(theirs), scope)
    return [_layer_pass(theirs, x, dy), _layer_pass(ours, x, dy), *_copy_passes(x.detach())]


def _layer_pass(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Pass:
    inputs = [x, *layer.parameters()]

    def forward_and_backward() -> list[float]:
        start = perf_counter()
        y = layer(x)
        middle = perf_counter()
        gradients = torch.autograd.grad(y, inputs, dy)
        end = perf_counter()
        del gradients  # kept until here, so that its release is not timed
        return [middle - start, end - middle]

    return forward_and_backward


def _copy_passes(x: torch.Tensor) -> list[Pass]:
    y = x.clone()

    def by_torch() -> list[float]:
        start = perf_counter()
        y.copy_(x)
        return [perf_counter() - start]

    def by_c_library() -> list[float]:
        start = perf_counter()
        ctypes.memmove(y.data_ptr(), x.data_ptr(), x.nbytes)
        return [perf_counter() - start]

    return [by_torch, by_c_library]


def sample(case: Case, passes: list[Pass], rounds: int, align: Callable[[], None]) -> torch.Tensor:
    """Run every pass once a round, each round beginning with another one.

    Args:
        case: Decides how many calls make up a sample.
        passes: What to time.
        rounds: How often; one more goes before, untimed.
        align: Called before each sample, so that the ranks start together.

    Shape:
        - Result: [rounds, parts of all passes], seconds a call
    """
    calls = min(MOST_CALLS_PER_SAMPLE, math.ceil(ELEMENTS_PER_SAMPLE / case.elements))
    samples = []
    for turn in range(rounds + 1):
        parts: dict[int, list[float]] = {}
        for offset in range(len(passes)):
            index = (turn + offset) % len(passes)
            align()
            parts[index] = _mean_parts(passes[index], calls)
        samples.append([seconds for index in range(len(passes)) for seconds in parts[index]])
    return torch.tensor(samples[1:], dtype=torch.float64)


def _mean_parts(one_pass: Pass, calls: int) -> list[float]:
    parts = zip(*(one_pass() for _ in range(calls)), strict=True)
    return [statistics.fmean(part) for part in parts]


def timing_of(samples: torch.Tensor) -> Timing:
    """Sum up what :func:`sample` gave for :func:`passes`."""
    torch_forward, torch_backward, forward, backward, *copies = samples.T.tolist()
    copy_seconds = min(statistics.median(seconds) for seconds in copies)
    return Timing(
        forward=_direction(forward, torch_forward, copy_seconds),
        backward=_direction(backward, torch_backward, copy_seconds),
        copy_milliseconds=1e3 * copy_seconds,
    )


def _direction(ours: list[float], theirs: list[float], copy_seconds: float) -> Direction:
    return Direction(
        milliseconds=1e3 * statistics.median(ours),
        torch_milliseconds=1e3 * statistics.median(theirs),
        ratio=Quartiles.of([t / o for t, o in zip(theirs, ours, strict=True)]),
        copies=statistics.median(ours) / copy_seconds,
    )
