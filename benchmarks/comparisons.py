# SPDX-License-Identifier: Apache-2.0
"""Comparisons other than training against torch's layer: slices, eval, oneDNN, XLA, memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional

from cases import Case
from kernels import Pass
from timing import (
    BACKWARD,
    FORWARD,
    Quartiles,
    layer_pass,
    layers_of,
    module_pass,
    ratio,
    sample,
)

THREADS = 2
ROUNDS = 5

LAYOUTS = ("NCHW", "NHWC")
BATCHES_OF_8 = ((8, 64, 56, 56), (32, 64, 56, 56), (8, 2048, 7, 7))
PEER_SHAPES = ((8, 64, 56, 56), (8, 2048, 7, 7), (2, 256, 129, 129))
MEMORY_SHAPE = (8, 256, 129, 129)


@dataclass(frozen=True)
class Comparison:
    """The ratio of two times.

    Args:
        case: The input.
        name: What is compared.
        forward: The ratio for forward.
        backward: The ratio for backward; None if there is none.
    """

    case: Case
    name: str
    forward: Quartiles
    backward: Quartiles | None


def compare_slices() -> Iterator[Comparison]:
    """Compare ``slices:8`` with a single norm batch."""
    for case in _cases(BATCHES_OF_8):
        x, dy = case.tensor().requires_grad_(), case.tensor()
        passes = {
            scope: module_pass(layers_of(case, scope)[1], x, dy) for scope in ("slices:8", "local")
        }
        yield _compared(case, "slices:8 / local", passes)


def compare_eval() -> Iterator[Comparison]:
    """Compare a forward in eval mode with torch's."""
    for case in _cases(BATCHES_OF_8):
        x = case.tensor()
        theirs, ours = (layer.eval() for layer in layers_of(case, "local"))
        passes = {"torch": _eval_pass(theirs, x), "normscope": _eval_pass(ours, x)}
        yield _compared(case, "torch / normscope, eval", passes)


def compare_peers() -> Iterator[Comparison]:
    """Compare normscope's faster layout with oneDNN, through torch, and XLA, if available."""
    for shape in PEER_SHAPES:
        plain = Case(shape, "NCHW", "float32")
        x, dy = plain.tensor(), plain.tensor()
        for name, make in (("oneDNN", _onednn_pass), ("XLA", _xla_pass)):
            peer = make(x, dy)
            if peer is None:
                continue
            passes = {name: peer}
            for layout in LAYOUTS:
                case = Case(shape, layout, "float32")
                ours = layers_of(case, "local")[1]
                passes[layout] = module_pass(ours, case.tensor().requires_grad_(), case.tensor())
            yield _compared(plain, f"{name} / normscope", passes)


def peak_memory() -> dict[str, float]:
    """Return the peak MiB that a training step adds to a process, measured in new processes."""
    return {kind: _peak_of_a_step(kind) for kind in ("torch", "normscope")}


def statistics_kept() -> dict[str, float]:
    """Return bytes per channel that a forward saves besides input, parameters and buffers."""
    case = Case(MEMORY_SHAPE, "NCHW", "float32")
    x = case.tensor().requires_grad_()
    theirs, ours = layers_of(case, "local")
    return {
        kind: _bytes_kept(layer, x) / case.shape[1]
        for kind, layer in (("torch", theirs), ("normscope", ours))
    }


def has_xla() -> bool:
    """Return whether jax is installed."""
    return importlib.util.find_spec("jax") is not None


def has_onednn() -> bool:
    """Return whether this torch was built with oneDNN."""
    return bool(torch.backends.mkldnn.is_available())


def _cases(shapes: tuple[tuple[int, ...], ...]) -> Iterator[Case]:
    for shape in shapes:
        for layout in LAYOUTS:
            yield Case(shape, layout, "float32")


def _compared(case: Case, name: str, passes: dict[str, Pass]) -> Comparison:
    """Divide the time of the first pass by that of the fastest other pass."""
    samples = sample(case, passes, ROUNDS)
    above, *others = samples

    def best(part: int) -> Quartiles:
        return max(
            (ratio(samples, part, above, other) for other in others), key=lambda one: one.median
        )

    has_backward = samples[above].shape[1] > BACKWARD
    return Comparison(case, name, best(FORWARD), best(BACKWARD) if has_backward else None)


def _eval_pass(layer: torch.nn.Module, x: torch.Tensor) -> Pass:
    def forward() -> list[float]:
        with torch.no_grad():
            start = perf_counter()
            layer(x)
            return [perf_counter() - start]

    return forward


def _bytes_kept(layer: torch.nn.Module, x: torch.Tensor) -> int:
    known = {tensor.data_ptr() for tensor in (x, *layer.parameters(), *layer.buffers())}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(kept.values())


def _onednn_pass(x: torch.Tensor, dy: torch.Tensor) -> Pass | None:
    """Run oneDNN on its own tensors, in the layout that torch uses for it."""
    if not has_onednn():
        return None
    channels = x.shape[1]
    mean, variance = torch.zeros(channels), torch.ones(channels)
    weight = torch.ones(channels, requires_grad=True)
    bias = torch.zeros(channels, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, mean, variance, weight, bias, training=True)

    opaque = x.to_mkldnn().requires_grad_()
    return layer_pass(layer, opaque, dy.to_mkldnn(), [weight, bias])


def _xla_pass(x: torch.Tensor, _: torch.Tensor) -> Pass | None:
    """Run the forward formula with XLA, channels-last, which is fastest on a CPU.

    There is no backward: compiled separately, it would compute the forward again.
    """
    if not has_xla():
        return None
    import jax

    numpy = jax.numpy

    def layer(x: Any, weight: Any, bias: Any) -> Any:  # noqa: ANN401 - arrays of jax
        mean = x.mean(axis=(0, 1, 2))
        variance = numpy.maximum(numpy.mean(x * x, axis=(0, 1, 2)) - mean * mean, 0.0)
        return (x - mean) * (weight / numpy.sqrt(variance + 1e-5)) + bias

    channels = x.shape[1]
    channels_last = numpy.asarray(x.permute(0, 2, 3, 1).contiguous().numpy())
    weight, bias = numpy.ones(channels), numpy.zeros(channels)
    compiled = jax.jit(layer)

    def forward() -> list[float]:
        start = perf_counter()
        compiled(channels_last, weight, bias).block_until_ready()
        return [perf_counter() - start]

    return forward


_STEP = """
import re, sys, torch, normscope
from pathlib import Path
layer = torch.nn.BatchNorm2d({channels})
if sys.argv[1] == "normscope":
    layer = normscope.convert(layer, "local")
status = Path("/proc/self/status")
peak = lambda: int(re.search(r"VmHWM:\\s+([0-9]+)", status.read_text())[1])
small = torch.randn(2, {channels}, 2, 2, requires_grad=True)
layer(small).sum().backward()
x, dy = torch.randn({shape}, requires_grad=True), torch.randn({shape})
before = peak()
for _ in range(3):
    layer(x).backward(dy)
    x.grad = None
print((peak() - before) / 1024)
"""


def _peak_of_a_step(kind: str) -> float:
    script = _STEP.format(channels=MEMORY_SHAPE[1], shape=MEMORY_SHAPE)
    command: list[str] = [sys.executable, "-c", script, kind]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
