# SPDX-License-Identifier: Apache-2.0
"""Prints how fast DistributedDataParallel trains a ResNet-50 on several GPUs, layer by layer.

One process for each GPU, as torchrun starts them, over NCCL and bound to its GPU. Measures training
steps (forward and backward of images of 224x224, gradients reduced) with torch.nn.BatchNorm2d,
which synchronizes nothing, normscope's ``world`` and torch.nn.SyncBatchNorm alternately. Then
exchanges alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import models
import normscope
from gpu_layers import captured  # lets one rank exchange
from gpu_networks import SETTINGS, Setting, columns, names_of_columns

ROUNDS = 8
STEPS = 3  # of each network in a round
WARM_UP = 3
CHANNELS = (64, 512, 2048)
CALLS = 20  # of an exchange in a round

# The time after which a rank stops waiting for one that has failed.
LIMIT = timedelta(seconds=30)

Call = Callable[[], object]
Seconds = dict[str, list[float]]

LEGEND = """\
ms       of a training step of all ranks, median of {rounds} rounds
ratio    time with torch.nn.BatchNorm2d, which synchronizes nothing, divided by the other in the
         same round, median: above 1, the other is faster
us       of a forward of a layer whose input has two elements per channel, and of
         torch.distributed.all_reduce with as many bytes as normscope sends; median of {rounds}
         rounds of {calls} calls"""

OTHERS = ("world", "sync")  # the last: torch.nn.SyncBatchNorm
EXCHANGES = ("local", "world", "all_reduce", "sync")


@dataclass(frozen=True)
class Plan:
    """What to measure, and where.

    Args:
        ranks: The number of processes.
        device: cuda; or cpu, without torch.nn.SyncBatchNorm, to see on a host that the rest runs.
        quick: Whether to measure little.
        json: A file for every figure.
    """

    ranks: int
    device: str
    quick: bool
    json: Path | None

    def settings(self) -> list[Setting]:
        """Return the batches of each rank."""
        chosen = [s for s in SETTINGS if (s.layout == "NHWC") == (s.dtype == "bfloat16")]
        return chosen[1:2] if self.quick else chosen

    def rounds(self) -> int:
        """Return how often everything is measured."""
        return 2 if self.quick else ROUNDS

    def image(self) -> int:
        """Return the width of an image."""
        return 224 if self.device == "cuda" else 32


def networks_of(plan: Plan, setting: Setting) -> dict[str, nn.Module]:
    """Return networks with the same weights, by the name of their layers."""
    torch.manual_seed(0)
    layout = torch.channels_last if setting.layout == "NHWC" else torch.contiguous_format
    theirs = models.resnet_50().to(plan.device).to(memory_format=layout)  # type: ignore[call-overload]
    networks = {"torch": theirs, "world": normscope.convert(copy.deepcopy(theirs), "world")}
    if plan.device == "cuda":
        networks["sync"] = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(theirs))
    return {name: _parallel(network.train()) for name, network in networks.items()}


def _parallel(network: nn.Module) -> nn.Module:
    parallel = DistributedDataParallel(network)
    # Otherwise rank 0 sends them before each step, which synchronized layers do not need.
    parallel.broadcast_buffers = False
    return parallel


def step_of(network: nn.Module, x: torch.Tensor, setting: Setting) -> Call:
    """Return a training step."""

    def step() -> None:
        network.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=setting.dtype == "bfloat16"):
            loss = network(x).float().square().mean()
        loss.backward()

    return step


def seconds_of(call: Call, calls: int) -> float:
    """Return the time of a call, if all ranks begin together."""
    call()
    distributed.barrier()
    _wait()
    begin = perf_counter()
    for _ in range(calls):
        call()
    _wait()
    return (perf_counter() - begin) / calls


def in_turn(calls: Mapping[str, Call], rounds: int, repeats: int) -> Seconds:
    """Return the seconds of each call in each round."""
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    seconds: Seconds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(seconds_of(call, repeats))
    return seconds


def exchanges(plan: Plan, channels: int) -> Iterator[tuple[str, Seconds]]:
    """Yield how calls are run, and the seconds of each layer's forward, and of an all-reduce."""
    x = torch.randn(2, channels, 1, 1, device=plan.device)
    layers: dict[str, nn.Module] = {
        "local": normscope.BatchNorm2d(channels, scope="local"),
        "world": normscope.BatchNorm2d(channels, scope="world"),
    }
    if plan.device == "cuda":
        layers["sync"] = nn.SyncBatchNorm(channels)
    calls: dict[str, Call] = {
        name: _forward_of(layer.to(plan.device), x) for name, layer in layers.items()
    }
    calls["world"]()  # the first call of a layer compares more
    before = normscope.training.communication_counters().bytes
    calls["world"]()
    sent = normscope.training.communication_counters().bytes - before
    message = torch.zeros(sent // 8, dtype=torch.int64, device=plan.device)
    calls["all_reduce"] = lambda: distributed.all_reduce(message)
    yield "eager", in_turn(calls, plan.rounds(), CALLS)
    if plan.device == "cuda":
        _wait()
        replays = {n: captured(c).replay for n, c in calls.items() if n != "sync"}
        yield "graph", in_turn(replays, plan.rounds(), CALLS)


def _forward_of(layer: nn.Module, x: torch.Tensor) -> Call:
    def forward() -> None:
        with torch.no_grad():
            layer(x)

    return forward


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def exchange_row(channels: int, how: str, seconds: Seconds) -> str:
    """Return a line of the second table."""
    text = f"{f'{channels} {how}':24}"
    for name in EXCHANGES:
        text += f"{1e6 * statistics.median(seconds[name]):12.1f}" if name in seconds else ""
    return text


def run_rank(rank: int, plan: Plan, store: str) -> None:
    """Measure everything as one rank; rank 0 prints and writes it."""
    device = torch.device(plan.device, rank) if plan.device == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo" if device is None else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=plan.ranks,
        timeout=LIMIT,
        device_id=device,
    )
    stream = torch.cuda.Stream() if device is not None else None  # which can be captured
    with torch.cuda.stream(stream):
        results = measure(plan, rank)
    if rank == 0 and plan.json is not None:
        content = {"ranks": plan.ranks, "device": plan.device, **results}
        plan.json.write_text(json.dumps(content, indent=1) + "\n")
    distributed.barrier()  # none leaves while another still exchanges
    distributed.destroy_process_group()


def measure(plan: Plan, rank: int) -> dict[str, object]:
    """Return every figure of this rank."""

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    steps, alone = [], []
    say(f"{plan.ranks} ranks\n\n{LEGEND.format(rounds=plan.rounds(), calls=CALLS)}\n")
    say(f"{'batch, layout, dtype':24}{names_of_columns(OTHERS)}")
    for setting in plan.settings():
        size = (setting.batch, 3, plan.image(), plan.image())
        layout = torch.channels_last if setting.layout == "NHWC" else torch.contiguous_format
        x = torch.randn(size, device=plan.device).to(memory_format=layout)
        networks = networks_of(plan, setting)
        calls = {name: step_of(network, x, setting) for name, network in networks.items()}
        seconds = in_turn(calls, plan.rounds(), STEPS)
        steps.append({"setting": asdict(setting), "seconds": seconds})
        say(f"{f'{setting}':24}{columns(seconds, OTHERS)}")
    say(f"\n{'channels, us':24}" + "".join(f"{name:>12}" for name in EXCHANGES))
    for channels in CHANNELS:
        for how, seconds in exchanges(plan, channels):
            alone.append({"channels": channels, "how": how, "seconds": seconds})
            say(exchange_row(channels, how, seconds))
    return {"steps": steps, "exchanges": alone}


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, help="processes; as many as GPUs by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one batch, two rounds")
    parser.add_argument("--json", type=Path, help="also write every figure to FILE", metavar="FILE")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if arguments.device == "cuda" and gpus < (arguments.ranks or 1):
        sys.exit(f"gpu_data_parallel.py: cuda: {gpus} devices for {arguments.ranks or 1} ranks")
    plan = Plan(arguments.ranks or max(gpus, 1), arguments.device, arguments.quick, arguments.json)
    with tempfile.TemporaryDirectory(prefix="normscope-ranks-") as folder:
        spawn(run_rank, (plan, f"{folder}/store"), plan.ranks)


if __name__ == "__main__":
    main()
