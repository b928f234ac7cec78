# SPDX-License-Identifier: Apache-2.0
"""Prints the speed of training a ResNet-50 on a GPU with normscope's layers, relative to torch's.

Measures training steps (forward and backward of images of 224x224) that are replayed from CUDA
graphs, of torch.nn's network and the converted ones alternately. Eagerly, such a step takes as long
as the host needs to launch it. With ``world``, a world of one exchanges over NCCL.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

os.environ["NORMSCOPE_FORCE_SYNC"] = "1"  # before the first exchange is made

import torch
from torch import distributed, nn

import models
import normscope

ROUNDS = 8
STEPS = 3  # of each network in a round
WARM_UP = 3

LEGEND = f"""\
ms       of a training step, median of {ROUNDS} rounds
ratio    torch's time divided by normscope's in the same round, median: above 1, normscope is
         faster. torch's layers synchronize nothing"""

HEADER = f"{'batch, layout, dtype':28}{'torch ms':>10}" + "".join(
    f"{name + ' ms':>10}{'ratio':>7}" for name in ("local", "world")
)


@dataclass(frozen=True)
class Setting:
    """A batch of images.

    Args:
        batch: Number of images.
        layout: NCHW or NHWC.
        dtype: float32, or bfloat16 for autocast to it.
    """

    batch: int
    layout: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.batch} {self.layout} {self.dtype}"


SETTINGS = (
    Setting(32, "NHWC", "bfloat16"),
    Setting(4, "NHWC", "bfloat16"),
    Setting(32, "NCHW", "bfloat16"),
    Setting(4, "NCHW", "float32"),
    Setting(32, "NCHW", "float32"),
)


def captured_step(network: nn.Module, x: torch.Tensor, dtype: str) -> torch.cuda.CUDAGraph:
    """Capture a training step in a graph, on the current stream."""
    network.train()

    def step() -> None:
        network.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = network(x).float().square().mean()
        loss.backward()

    for _ in range(WARM_UP):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph


def seconds_of(step: Callable[[], None]) -> float:
    """Return the time of a step after an untimed one."""
    step()
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (perf_counter() - begin) / STEPS


def measure(setting: Setting) -> dict[str, list[float]]:
    """Return the seconds of a step in each round, by the name of the layers."""
    layout = torch.channels_last if setting.layout == "NHWC" else torch.contiguous_format
    torch.manual_seed(0)
    x = torch.randn(setting.batch, 3, 224, 224, device="cuda").to(memory_format=layout)
    theirs = models.resnet_50().cuda().to(memory_format=layout)  # type: ignore[call-overload]
    networks = {
        "torch": theirs,
        "local": normscope.convert(copy.deepcopy(theirs), "local"),
        "world": normscope.convert(copy.deepcopy(theirs), "world"),
    }
    graphs = {name: captured_step(net, x, setting.dtype) for name, net in networks.items()}
    seconds: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            seconds[name].append(seconds_of(graph.replay))
    return seconds


def row(setting: Setting, seconds: dict[str, list[float]]) -> str:
    """Return a line of the table."""
    text = f"{setting!s:28}{1e3 * statistics.median(seconds['torch']):10.2f}"
    for name in ("local", "world"):
        ratios = [a / b for a, b in zip(seconds["torch"], seconds[name], strict=True)]
        text += f"{1e3 * statistics.median(seconds[name]):10.2f}{statistics.median(ratios):7.2f}"
    return text


def main() -> None:
    """Measure all settings, and print the result of each immediately."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write every figure to FILE", metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_networks.py: cuda: no device")
    torch.cuda.set_device(0)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        print(f"{torch.cuda.get_device_name()}\n\n{LEGEND}\n\n{HEADER}")
        with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
            for setting in SETTINGS:
                seconds = measure(setting)
                results.append({"setting": asdict(setting), "seconds": seconds})
                print(row(setting, seconds), flush=True)
        distributed.destroy_process_group()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
