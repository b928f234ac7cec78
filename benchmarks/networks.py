# SPDX-License-Identifier: Apache-2.0
"""Prints the speed of training networks with normscope's layers, relative to torch's.

Measures whole training steps (forward and backward) of torch's network and the converted one
alternately, with the same weights and inputs; and, with torch.profiler, the time of the
normalization ops.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import distributed, nn
from torch.profiler import ProfilerActivity, profile

import models
import normscope
from ranks import on_ranks

ROUNDS = 6
SIZE_OF_WORLD = 2

LEGEND = f"""\
step     milliseconds of a training step with normscope's layers, median of {ROUNDS} rounds
ratio    torch's time divided by normscope's in the same round: above 1, normscope is faster;
         quartiles over the rounds
ops      the same of the normalization ops, from as many rounds of profiled steps; a compiled
         network has none of its own
world    {SIZE_OF_WORLD} ranks with a batch each; torch's layers synchronize nothing"""

COLUMNS = f"{'':65}{'step ms':>9}{'ratio':>7} {'(quartiles)':<11}{'ops ms':>9}{'ratio':>7}"


# Networks by name, and the shape of an image.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-50": (models.resnet_50, (3, 128, 128)),
    "DeepLabv3": (models.deeplab, (3, 97, 97)),
    "MobileNetV2": (models.mobilenet_v2, (3, 128, 128)),
    "3-D U-Net": (models.UNet3d, (1, 24, 32, 32)),
}


@dataclass(frozen=True)
class Setting:
    """The network to train, and how to train it.

    Args:
        network: One of NETWORKS.
        batch: Samples per rank.
        layout: "contiguous" or "channels_last".
        dtype: float32, or bfloat16 for autocast to it.
        threads: Number of threads of each process.
        compiled: Whether to use torch.compile.
        scope: local, or world on two ranks.
    """

    network: str
    batch: int
    layout: str = "contiguous"
    dtype: str = "float32"
    threads: int = 1
    compiled: bool = False
    scope: str = "local"

    def __str__(self) -> str:
        mode = "compiled" if self.compiled else "eager"
        layout = {"contiguous": "", "channels_last": " channels-last"}[self.layout]
        dtype = {"float32": "", "bfloat16": " bf16"}[self.dtype]
        return (
            f"{self.network} x{self.batch}{layout}{dtype}, {mode}, {self.threads} thread"
            f"{'s' if self.threads > 1 else ''}, {self.scope}"
        )


@dataclass(frozen=True)
class Result:
    """Milliseconds and ratios of one setting.

    Args:
        step: Median time of a step with normscope.
        ratio: Time of torch's step divided by normscope's, three quartiles.
        ops: Time of the normalization ops in a step with normscope; None if compiled.
        ops_ratio: Time of torch's ops divided by that of normscope's; None if compiled.
    """

    step: float
    ratio: tuple[float, float, float]
    ops: float | None
    ops_ratio: float | None


def settings() -> list[Setting]:
    """Return settings that differ from an eager float32 network in one point."""
    chosen = []
    for network in NETWORKS:
        chosen += [
            Setting(network, 2),
            Setting(network, 4, "channels_last"),
            Setting(network, 2, scope="world"),
        ]
    return [
        *chosen,
        Setting("ResNet-50", 4, "channels_last", "bfloat16"),
        Setting("3-D U-Net", 4, "channels_last", "bfloat16"),
        Setting("ResNet-50", 2, threads=2),
        Setting("3-D U-Net", 4, "channels_last", threads=2),
        Setting("3-D U-Net", 2, compiled=True),
        Setting("MobileNetV2", 4, "channels_last", compiled=True),
        Setting("MobileNetV2", 4, "channels_last", compiled=True, scope="world"),
    ]


def measure(setting: Setting) -> Result:
    """Measure a setting in new processes, one per rank of the scope; return the mean."""
    ranks = SIZE_OF_WORLD if setting.scope == "world" else 1
    result, *_ = on_ranks(ranks, _measure_as_rank, setting, limit=None)
    return result


def _measure_as_rank(setting: Setting) -> Result:
    torch.set_num_threads(setting.threads)
    torch.manual_seed(0)
    steps = _steps_of(setting)
    step = _taking_turns(steps, _seconds_of)
    ops = None if setting.compiled else _taking_turns(steps, _seconds_of_ops)
    return Result(
        step=1e3 * statistics.median(step["normscope"]),
        ratio=_quartiles_of_ratio(step),
        ops=None if ops is None else 1e3 * statistics.median(ops["normscope"]),
        ops_ratio=None if ops is None else _quartiles_of_ratio(ops)[1],
    )


def _quartiles_of_ratio(seconds: dict[str, list[float]]) -> tuple[float, float, float]:
    """Return the quartiles of torch's time divided by normscope's in each round."""
    ratios = [a / b for a, b in zip(seconds["torch"], seconds["normscope"], strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return lower, median, upper


def _steps_of(setting: Setting) -> dict[str, Callable[[], None]]:
    """Return a training step of each network, by name."""
    factory, image = NETWORKS[setting.network]
    theirs = factory()
    ours = normscope.convert(copy.deepcopy(theirs), setting.scope)
    x = torch.randn(setting.batch, *image)
    is_3d = x.dim() == 5
    memory_format = torch.contiguous_format
    if setting.layout == "channels_last":
        memory_format = torch.channels_last_3d if is_3d else torch.channels_last
    x = x.to(memory_format=memory_format)
    return {
        name: _step(network.to(memory_format=memory_format), x, setting)  # type: ignore[call-overload]
        for name, network in (("torch", theirs), ("normscope", ours))
    }


def _step(network: nn.Module, x: torch.Tensor, setting: Setting) -> Callable[[], None]:
    network.train()
    run: Callable[[torch.Tensor], torch.Tensor] = network
    if setting.compiled:
        run = torch.compile(network)

    def step() -> None:
        network.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.dtype == "bfloat16"):
            loss = run(x).float().square().mean()
        loss.backward()

    return step


def _taking_turns(
    steps: dict[str, Callable[[], None]], seconds_of: Callable[[Callable[[], None]], float]
) -> dict[str, list[float]]:
    """Return the seconds of each step in each round, without the first round."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS + 1):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            if distributed.is_initialized():
                distributed.barrier()
            steps[name]()  # untimed, because the other network has changed the caches
            taken = seconds_of(steps[name])
            if turn > 0:
                seconds[name].append(taken)
    return seconds


def _seconds_of(step: Callable[[], None]) -> float:
    begin = perf_counter()
    step()
    return perf_counter() - begin


_FORWARD_OPS = ("aten::batch_norm", "normscope::batch_norm_forward")
_BACKWARD_NODES = "BatchNorm"  # in the name of each


def _seconds_of_ops(step: Callable[[], None]) -> float:
    """Return the seconds of the normalization ops of a step, including what they call."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    microseconds = 0.0
    for event in profiler.events():
        # An op inside another is a part of it, for example a sum of gradients.
        is_forward = event.name in _FORWARD_OPS and event.cpu_parent is None
        is_backward = event.name.startswith("autograd::engine") and _BACKWARD_NODES in event.name
        if is_forward or is_backward:
            microseconds += event.cpu_time_total
    return float(microseconds) / 1e6


def row(setting: Setting, result: Result) -> str:
    """Return a line of the table."""
    lower, median, upper = result.ratio
    text = f"{setting!s:65}{result.step:9.1f}{median:7.2f} ({lower:.2f}-{upper:.2f})"
    if result.ops is not None:
        text += f"{result.ops:9.2f}{result.ops_ratio:7.2f}"
    return text


def main() -> None:
    """Measure all settings, and print the result of each immediately."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="settings whose text contains this", metavar="T")
    parser.add_argument("--json", type=Path, help="also write every figure to FILE", metavar="FILE")
    arguments = parser.parse_args()

    # Silences the log of the profiler in child processes.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    print(f"{LEGEND}\n\n{COLUMNS}")
    results = []
    for setting in settings():
        if arguments.only not in str(setting):
            continue
        result = measure(setting)
        results.append({"setting": asdict(setting), "result": asdict(result)})
        print(row(setting, result), flush=True)
    ratios = [entry["result"]["ops_ratio"] for entry in results if entry["result"]["ops_ratio"]]
    if ratios:
        print(
            f"ops, geometric mean {statistics.geometric_mean(ratios):.2f}, least {min(ratios):.2f}"
        )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        only = f' ARGS="--only {arguments.only}"' if arguments.only else ""
        content = {"command": f"make bench-networks{only}", "results": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
