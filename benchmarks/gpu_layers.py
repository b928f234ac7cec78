# SPDX-License-Identifier: Apache-2.0
"""Prints the speed of normscope's layers in training on a GPU, compared to that of a copy.

Uses CUDA events around each call, for forward and backward separately, with and without a flush of
the second-level cache, in eager mode and replayed from a CUDA graph. Compares normscope, alone and
with an exchange in a world of one, to torch.nn.BatchNorm2d and the function of
torch.nn.SyncBatchNorm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

os.environ["NORMSCOPE_FORCE_SYNC"] = "1"  # before the first exchange is made

import torch
from torch import distributed
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction
from torch.profiler import ProfilerActivity, profile

import normscope
from cases import Case, all_cases, few_cases

ROUNDS = 20
WARM_UP = 3
CALLS_FOR_HOST_TIME = 50

Call = Callable[[], object]
Layer = Callable[[torch.Tensor], torch.Tensor]

LEGEND = """\
us       of one call, the median of {rounds}; the second-level cache is flushed before each
warm     the same without the flush
graph    the same, flushed, replayed from a CUDA graph
share    of the rate at which a copy of x runs here, for reading x and writing y (2B), or reading x
         and dy and writing dx (3B); with an exchange 3B and 5B. From the graph
kernels  launches a call; host: us that the calling thread takes"""


@dataclass(frozen=True)
class Direction:
    """Forward or backward of one layer; times in microseconds."""

    eager: float
    warm: float
    graph: float
    share: float
    kernels: int
    host: float


@dataclass(frozen=True)
class Row:
    """The results for one layer and one input.

    Args:
        case: shape, layout and dtype.
        layer: name of the layer.
        forward: results of forward.
        backward: results of backward with respect to input, weight and bias.
        peak_bytes: memory that forward and backward take in addition to their input.
    """

    case: str
    layer: str
    forward: Direction
    backward: Direction
    peak_bytes: int


class Flush:
    """Overwrites the second-level cache."""

    def __init__(self) -> None:
        cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self._memory = torch.empty(2 * cache_bytes, dtype=torch.int8, device="cuda")

    def __call__(self) -> None:
        """Queue the flush."""
        self._memory.zero_()


def microseconds(call: Call, before: Call) -> float:
    """Return the median time of several calls, each after a call of ``before``."""
    begin = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS)]
    end = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS)]
    for _ in range(WARM_UP):
        before()
        call()
    for begins, ends in zip(begin, end, strict=True):
        before()
        begins.record()
        call()
        ends.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [b.elapsed_time(e) for b, e in zip(begin, end, strict=True)]
    return 1e3 * statistics.median(milliseconds)


def host_microseconds(call: Call) -> float:
    """Return the time that the calling thread takes for one call."""
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(CALLS_FOR_HOST_TIME):
        call()
    seconds = perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * seconds / CALLS_FOR_HOST_TIME


def launches(call: Call) -> int:
    """Return the number of kernels that one call launches."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(
        "CUDA" in str(event.device_type) and "Memset" not in event.name for event in seen.events()
    )


@contextmanager
def world_of_one() -> Iterator[None]:
    """Make a group of this process over NCCL, and a current stream that can be captured.

    The default stream cannot, and a backward runs on the stream of its forward.
    """
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
        distributed.destroy_process_group()


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """Capture the launches of ``call`` in a graph, on the current stream."""
    for _ in range(WARM_UP):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph


def direction_of(call: Call, bytes_moved: int, copy_rate: float, flush: Flush) -> Direction:
    """Measure one direction; ``copy_rate`` in bytes per microsecond."""
    eager, warm = microseconds(call, flush), microseconds(call, lambda: None)
    graph = microseconds(captured(call).replay, flush)
    return Direction(
        eager=eager,
        warm=warm,
        graph=graph,
        share=bytes_moved / graph / copy_rate,
        kernels=launches(call),
        host=host_microseconds(call),
    )


def torch_synchronized(layer: torch.nn.BatchNorm2d) -> Layer:
    """Return torch.nn.SyncBatchNorm's function; the module would not synchronize here."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = SyncBatchNormFunction.apply(
            x,
            layer.weight,
            layer.bias,
            layer.running_mean,
            layer.running_var,
            layer.eps,
            layer.momentum,
            distributed.group.WORLD,
            1,
        )
        return y

    return forward


def layers(channels: int) -> list[tuple[str, Layer, list[torch.nn.Parameter], bool]]:
    """Return name, layer, parameters, and whether it exchanges, for each layer."""
    local = normscope.BatchNorm2d(channels, scope="local").cuda()
    world = normscope.BatchNorm2d(channels, scope="world").cuda()
    theirs = torch.nn.BatchNorm2d(channels).cuda()
    for_sync = torch.nn.BatchNorm2d(channels).cuda()
    return [
        ("normscope local", local, list(local.parameters()), False),
        ("torch BatchNorm2d", theirs, list(theirs.parameters()), False),
        ("normscope world", world, list(world.parameters()), True),
        ("torch SyncBatchNorm", torch_synchronized(for_sync), list(for_sync.parameters()), True),
    ]


def peak_bytes(layer: Layer, x: torch.Tensor, dy: torch.Tensor, inputs: list[torch.Tensor]) -> int:
    """Return the memory that a training step takes in addition to its input."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(layer(x), inputs, dy)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(case: Case, flush: Flush) -> list[Row]:
    """Measure every layer with one input."""
    x, dy = case.tensor().cuda().requires_grad_(), case.tensor().cuda()
    target = torch.empty_like(x)
    copy_rate = 2 * x.nbytes / microseconds(lambda: target.copy_(x.detach()), flush)
    rows = []
    for name, layer, parameters, exchanges in layers(case.shape[1]):
        inputs = [x, *parameters]
        peak = peak_bytes(layer, x, dy, inputs)
        with torch.enable_grad():
            y = layer(x)
        forward = direction_of(
            partial(layer, x),
            (3 if exchanges else 2) * x.nbytes,
            copy_rate,
            flush,
        )
        backward = direction_of(
            partial(torch.autograd.grad, y, inputs, dy, retain_graph=True),
            (5 if exchanges else 3) * x.nbytes,
            copy_rate,
            flush,
        )
        rows.append(Row(str(case), name, forward, backward, peak))
        print(_text(rows[-1]), flush=True)
    return rows


_DIRECTION = f"{'us':>8}{'warm':>8}{'graph':>8}{'share':>6}{'kernels':>8}{'host':>6}"
HEADER = (
    f"{'':48}{'forward':^{len(_DIRECTION)}}  {'backward':^{len(_DIRECTION)}}\n"
    f"{'input':28}{'layer':20}{_DIRECTION}  {_DIRECTION}{'MiB':>7}"
)


def _text(row: Row) -> str:
    columns = "  ".join(
        f"{d.eager:8.1f}{d.warm:8.1f}{d.graph:8.1f}{d.share:6.2f}{d.kernels:8}{d.host:6.0f}"
        for d in (row.forward, row.backward)
    )
    return f"{row.case:28}{row.layer:20}{columns}{row.peak_bytes / 2**20:7.1f}"


def targets(rows: list[Row]) -> list[str]:
    """Compare the eager time of torch.nn.SyncBatchNorm with normscope's, by batch size."""
    lines = []
    for batch in sorted({row.case.split("x")[0] for row in rows}, key=int):
        of_batch = [row for row in rows if row.case.split("x")[0] == batch]
        pairs = zip(
            (row for row in of_batch if row.layer == "torch SyncBatchNorm"),
            (row for row in of_batch if row.layer == "normscope world"),
            strict=True,
        )
        ratios = [
            (theirs.forward.eager + theirs.backward.eager)
            / (ours.forward.eager + ours.backward.eager)
            for theirs, ours in pairs
        ]
        lines.append(
            f"batch {batch}: torch.nn.SyncBatchNorm takes {statistics.geometric_mean(ratios):.1f} "
            f"times as long, eager ({min(ratios):.1f} to {max(ratios):.1f})"
        )
    return lines


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure a few shapes")
    parser.add_argument("--json", type=Path, help="also write every figure to FILE", metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_layers.py: cuda: no device")
    with world_of_one():
        print(f"{torch.cuda.get_device_name()}\n\n{LEGEND.format(rounds=ROUNDS)}\n\n{HEADER}")
        flush = Flush()
        cases = few_cases() if arguments.quick else all_cases()
        rows = [row for case in cases if case.layout != "NC" for row in measure(case, flush)]
    print("", *targets(rows), sep="\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
