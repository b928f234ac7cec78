# SPDX-License-Identifier: Apache-2.0
"""Prints the speed of training a ResNet-50 on a GPU with normscope's layers, relative to torch's.

Measures training steps (forward and backward of images of 224x224) of torch.nn's network and the
converted ones alternately, replayed from CUDA graphs and eagerly. An eager step takes as long as
the host needs to launch it. With ``world``, a world of one exchanges over NCCL, and so does the
function of torch.nn.SyncBatchNorm, which a graph cannot capture.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import models
import normscope
from gpu_layers import captured, torch_synchronized, world_of_one  # lets one rank exchange

ROUNDS = 8
STEPS = 3  # of each network in a round
WARM_UP = 3

Step = Callable[[], None]

LEGEND = f"""\
ms       of a training step, median of {ROUNDS} rounds
ratio    time with torch's BatchNorm2d, which synchronizes nothing, divided by the other in the
         same round, median: above 1, the other is faster"""

OTHERS = ("local", "world", "sync")  # the last: torch.nn.SyncBatchNorm


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
    Setting(32, "NHWC", "float32"),
)


def step_of(network: nn.Module, x: torch.Tensor, dtype: str) -> Step:
    """Return a training step, run a few times already."""
    network.train()

    def step() -> None:
        network.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = network(x).float().square().mean()
        loss.backward()

    for _ in range(WARM_UP):
        step()
    return step


def synchronized(network: nn.Module) -> nn.Module:
    """Let torch.nn.SyncBatchNorm's function normalize in the network."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.forward = torch_synchronized(module)  # type: ignore[method-assign, assignment]
    return network


def seconds_of(step: Step) -> float:
    """Return the time of a step after an untimed one."""
    step()
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (perf_counter() - begin) / STEPS


def measure(setting: Setting) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield how steps are run, and the seconds of a step in each round by the layers' name."""
    layout = torch.channels_last if setting.layout == "NHWC" else torch.contiguous_format
    torch.manual_seed(0)
    x = torch.randn(setting.batch, 3, 224, 224, device="cuda").to(memory_format=layout)
    theirs = models.resnet_50().cuda().to(memory_format=layout)  # type: ignore[call-overload]
    networks = {
        "torch": theirs,
        "local": normscope.convert(copy.deepcopy(theirs), "local"),
        "world": normscope.convert(copy.deepcopy(theirs), "world"),
        "sync": synchronized(copy.deepcopy(theirs)),
    }
    eager = {name: step_of(network, x, setting.dtype) for name, network in networks.items()}
    yield "eager", in_turn(eager)
    replays = {name: captured(eager[name]).replay for name in ("torch", "local", "world")}
    yield "graph", in_turn(replays)


def in_turn(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Return the seconds of each step in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step))
    return seconds


def names_of_columns(others: Sequence[str]) -> str:
    """Return the names of what columns() returns."""
    return f"{'torch ms':>10}" + "".join(f"{name + ' ms':>10}{'ratio':>7}" for name in others)


def columns(seconds: dict[str, list[float]], others: Sequence[str]) -> str:
    """Return the time of torch's layers, and the times and ratios of the others."""
    text = f"{1e3 * statistics.median(seconds['torch']):10.2f}"
    for name in others:
        if name in seconds:
            ratios = [a / b for a, b in zip(seconds["torch"], seconds[name], strict=True)]
            text += (
                f"{1e3 * statistics.median(seconds[name]):10.2f}{statistics.median(ratios):7.2f}"
            )
    return text


def main() -> None:
    """Measure all settings, and print the result of each immediately."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write every figure to FILE", metavar="FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_networks.py: cuda: no device")
    results = []
    with world_of_one():
        print(f"{torch.cuda.get_device_name()}\n\n{LEGEND}\n")
        print(f"{'batch, layout, dtype':34}{names_of_columns(OTHERS)}")
        for setting in SETTINGS:
            for how, seconds in measure(setting):
                results.append({"setting": asdict(setting), "how": how, "seconds": seconds})
                print(f"{f'{setting}, {how}':34}{columns(seconds, OTHERS)}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
