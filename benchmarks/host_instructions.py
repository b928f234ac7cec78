# SPDX-License-Identifier: Apache-2.0
"""Prints how many instructions of the host a call of a layer takes, in training from Python.

callgrind counts them (the package valgrind), so the numbers do not depend on the machine's load.
The input is 2x8x1x1, which leaves next to nothing to compute. On devices, the host's part of a call
is what eager networks wait for. The second device is one of the tests, a device type of torch:
normscope by torch's kernels, and torch.nn.SyncBatchNorm. What a device would do, its operations and
kernels, is not counted there. torch.nn.SyncBatchNorm does not train on CPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

CALLS = 40
WARM_UP = 20  # also lets Python specialize its code
ROUNDS = 3

Layer = Callable[[Any], Any]
Counts = dict[str, dict[str, int]]  # by layer, by direction

# Functions that stand for work of a device. Instructions in them are not counted.
OF_DEVICES = {
    "cpu": [],
    "testdevice": [
        "normscope::test_device::(anonymous namespace)::run_on_host*",
        "torch::impl::dispatch::PythonKernelHolder::operator()*",
    ],
}


# ---- Below callgrind -----------------------------------------------------------------------------


def synchronized_kernels() -> Any:  # noqa: ANN401 - kept by the caller
    """Give the device type the kernels of torch.nn.SyncBatchNorm, without their arithmetic.

    Those of tests/support compute with operations of the device. callgrind would count these,
    because it toggles at each function of OF_DEVICES, also inside of another one.
    """
    import torch

    of_channels: list[Any] = [torch.ones(8).to("testdevice") for _ in range(4)]
    kernels = torch.library.Library("aten", "IMPL")
    results = {
        "batch_norm_stats": lambda *_: tuple(of_channels[:2]),
        "batch_norm_gather_stats_with_counts": lambda *_: tuple(of_channels[:2]),
        "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
        "batch_norm_elemt.out": lambda *_, out: out,
        "batch_norm_backward_reduce": lambda *_: tuple(of_channels),
        "batch_norm_backward_elemt": lambda dy, *_: torch.empty_like(dy),
    }
    for name, kernel in results.items():
        kernels.impl(name, kernel, "PrivateUse1")
    return kernels


def layers_on(device: str) -> Iterator[tuple[str, Layer]]:
    """Make one layer after the other."""
    import torch
    from torch import distributed
    from torch.nn.modules._functions import SyncBatchNorm

    import normscope

    class Synchronized(torch.nn.SyncBatchNorm):
        """Exchanges in a world of one too, as normscope does here."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.get_buffer("num_batches_tracked").add_(1)
            y: torch.Tensor = SyncBatchNorm.apply(
                input.contiguous(),
                self.weight,
                self.bias,
                self.running_mean,
                self.running_var,
                self.eps,
                self.momentum,
                distributed.group.WORLD,
                1,
            )
            return y

    yield "torch.nn.BatchNorm2d", torch.nn.BatchNorm2d(8).to(device)
    if device == "testdevice":
        yield "torch.nn.SyncBatchNorm", Synchronized(8).to(device)
    yield "normscope, local", normscope.BatchNorm2d(8, scope="local").to(device)
    yield "normscope, world", normscope.BatchNorm2d(8, scope="world").to(device)


def run(device: str) -> None:
    """Train each layer, and let callgrind write what that took."""
    import torch
    from torch import distributed

    backends, kernels = "gloo", None
    if device == "testdevice":
        sys.path.insert(0, str(ROOT / "tests/support"))
        import torch_device

        torch_device.load()
        backends, kernels = torch_device.BACKENDS, synchronized_kernels()
    requests = ctypes.CDLL(os.environ["CALLGRIND_REQUESTS"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            backends, init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        x = torch.randn(2, 8, 1, 1).to(device).requires_grad_()
        dy = torch.randn(2, 8, 1, 1).to(device)
        requests.start()
        for name, layer in layers_on(device):
            count(requests, name, layer, x, dy)
        distributed.destroy_process_group()
    del kernels  # registered until here


def count(requests: Any, name: str, layer: Any, x: Any, dy: Any) -> None:  # noqa: ANN401
    """Let callgrind write the instructions of forwards and of backwards."""
    import torch

    inputs = [x, layer.weight, layer.bias]
    for _ in range(WARM_UP):
        torch.autograd.grad(layer(x), inputs, dy)
    gc.collect()
    gc.disable()
    for _ in range(ROUNDS):
        outputs: list[Any] = [None] * CALLS
        requests.zero()
        for i in range(CALLS):
            outputs[i] = layer(x)
        requests.dump(f"{name}/forward".encode())
        requests.zero()
        for y in outputs:
            torch.autograd.grad(y, inputs, dy)
        requests.dump(f"{name}/backward".encode())
    gc.enable()


# ---- Above it ------------------------------------------------------------------------------------


def counts_on(device: str, keep: Path | None) -> Counts:
    """Run this program under callgrind, and read what it writes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        requests = Path(temporary) / "requests.so"
        source = Path(__file__).with_name("callgrind_requests.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", requests, source], check=True)
        environment = {
            **os.environ,
            "CALLGRIND_REQUESTS": str(requests),
            "NORMSCOPE_FORCE_SYNC": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        counted = subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                "--instr-atstart=no",
                f"--callgrind-out-file={folder}/{device}",
                *(f"--toggle-collect={name}" for name in OF_DEVICES[device]),
                "--collect-atstart=yes",  # which the toggles change
                sys.executable,
                __file__,
                f"--run={device}",
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if counted.returncode != 0:
            raise SystemExit(counted.stderr)
        counts: Counts = {}
        for file in sorted(folder.glob(f"{device}.*")):
            text = file.read_text()
            what = re.search(r"^desc: Trigger: Client Request: (.+)/(\w+)$", text, re.MULTILINE)
            total = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
            if what is None or total is None:
                continue
            of_layer = counts.setdefault(what[1], {})
            of_call = int(total[1]) // CALLS
            of_layer[what[2]] = min(of_layer.get(what[2], of_call), of_call)
        return counts


def main() -> None:
    """Print the counts on each device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=OF_DEVICES, help=argparse.SUPPRESS)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--devices", nargs="*", default=[*OF_DEVICES], choices=OF_DEVICES)
    parser.add_argument("--keep", type=Path, help="a folder for callgrind's files")
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run)
        return
    os.environ["NORMSCOPE_TEST_DEVICE_LIBRARY"] = str(
        arguments.build.absolute() / "tests/torch_device/torch_device.so"
    )
    results = {}
    print(f"{'':38}{'forward':>12}{'backward':>12}")
    for device in arguments.devices:
        results[device] = counts_on(device, arguments.keep)
        for name, of_layer in results[device].items():
            forward, backward = of_layer["forward"], of_layer["backward"]
            print(f"{device:12}{name:26}{forward:12,}{backward:12,}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"command": "make bench-host", "results": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
