# SPDX-License-Identifier: Apache-2.0
"""Builds normscope for the GPU at hand, tests it there, measures it, and writes down what came out.

Needs no network: a C++20 compiler, CMake, ninja, nvcc, and a Python with a CUDA build of torch and
pytest. GoogleTest is taken from a folder of its sources where it is not installed: `make carry`
puts them into build/carry/googletest on a machine that has them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from count_tests import describe, outcome

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 480  # of all of it

# Cases that compute-sanitizer looks at: it slows kernels down a hundredfold.
SANITIZED = "*FollowTheSpecification/*_float32_channels_*"


@dataclass
class Step:
    """One command and what became of it."""

    name: str
    command: list[str]
    status: str = "not run"
    seconds: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


class Check:
    """Runs steps within a time limit for all of them."""

    def __init__(self, build: Path, results: Path) -> None:
        self.build = build
        self.results = results
        self.steps: list[Step] = []
        self._deadline = time.monotonic() + SECONDS

    def run(
        self,
        name: str,
        command: Sequence[str],
        junit: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> bool:
        """Run one command; its output goes to a log of its own, its end to the results."""
        step = Step(name, [str(part) for part in command])
        self.steps.append(step)
        print(f"{name} ...", end=" ", flush=True)
        start = time.monotonic()
        log = self.results / f"{name}.log"
        with log.open("w") as output:
            try:
                code: int | str = subprocess.run(
                    step.command,
                    cwd=ROOT,
                    env=os.environ | dict(environment or {}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=max(1.0, self._deadline - start),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = "out of time"
        step.seconds = round(time.monotonic() - start, 1)
        step.status = "passed" if code == 0 else f"failed ({code})"
        if junit is not None and junit.exists():
            _count_tests(step, junit)
        if code != 0:
            step.tail = log.read_text(errors="replace").splitlines()[-60:]
        print(f"{step.status} in {step.seconds:.0f} s {step.tests or ''}", flush=True)
        for line in [*step.failed[:20], *step.tail[-30:]]:
            print(f"    {line}")
        return code == 0


def _count_tests(step: Step, junit: Path) -> None:
    cases = list(ElementTree.parse(junit).iter("testcase"))
    step.tests = dict(Counter(map(outcome, cases)))
    step.failed = [describe(case) for case in cases if outcome(case) == "failed"]


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def describe_machine() -> dict[str, str]:
    """The device, and the versions of what drives it."""
    release = re.search(r"release [\d.]+, V[\d.]+", _output_of("nvcc", "--version"))
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": release.group() if release else "unknown",
        "torch": str(torch.__version__),
        "cuda of torch": str(torch.version.cuda),
        "nccl of torch": ".".join(map(str, nccl)),
        "python": sys.version.split()[0],
        "commit": _output_of("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }


def architecture() -> str:
    """Of the GPU at hand; the one of an H100 and an H200 where there is none."""
    if not torch.cuda.is_available():
        return "90"
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def build(check: Check, googletest: Path) -> bool:
    """Configure and build the library, its tests, and a package normscope in build/site."""
    carried = [f"-DNORMSCOPE_GOOGLETEST={googletest}"] if googletest.is_dir() else []
    configured = check.run(
        "configure",
        [
            *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(check.build)),
            *("-DNORMSCOPE_BUILD_CUDA=ON", "-DNORMSCOPE_BUILD_TESTS=ON"),
            f"-DNORMSCOPE_CUDA_ARCHITECTURES={architecture()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *carried,
        ],
    )
    targets = ["normscope_torch", "cuda_kernels_test", "cuda_batch_norm_test"]
    if not configured or not check.run(
        "build", ["cmake", "--build", str(check.build), "--target", *targets]
    ):
        return False
    site = check.build / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(
        ROOT / "python" / "normscope",
        site / "normscope",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return check.run(
        "install",
        [
            *("cmake", "--install", str(check.build), "--component", "python"),
            *("--prefix", str(site)),
        ],
    )


def test(check: Check) -> None:
    """The contract suites and the Python suite, on the device."""
    environment = {"PYTHONPATH": str(check.build / "site")}
    check.run("describe", [sys.executable, "-m", "normscope"], environment=environment)
    for suite in ("kernels/cuda_kernels_test", "batch_norm/cuda_batch_norm_test"):
        junit = check.results / f"{Path(suite).name}.xml"
        check.run(
            Path(suite).name,
            [str(check.build / "tests" / suite), f"--gtest_output=xml:{junit}"],
            junit,
        )
    junit = check.results / "python.xml"
    check.run(
        "python",
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"),
            *("-W", "default"),  # torch's own are no business of this check
            *("tests/python/test_cuda.py", f"--junitxml={junit}"),
        ],
        junit,
        environment,
    )


def sanitize(check: Check) -> None:
    """A subset under compute-sanitizer, where it is installed."""
    if shutil.which("compute-sanitizer") is None:
        check.steps.append(Step("compute-sanitizer", [], status="not installed"))
        return
    for tool in ("memcheck", "racecheck"):
        check.run(
            f"compute-sanitizer-{tool}",
            [
                *("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
                *(str(check.build / "tests/kernels/cuda_kernels_test"),),
                f"--gtest_filter={SANITIZED}",
            ],
        )


def measure(check: Check) -> list[object]:
    """The benchmark's rows."""
    figures = check.results / "gpu_layers.json"
    check.run(
        "benchmark",
        [sys.executable, "benchmarks/gpu_layers.py", "--json", str(figures)],
        environment={"PYTHONPATH": str(check.build / "site")},
    )
    rows: list[object] = json.loads(figures.read_text()) if figures.exists() else []
    return rows


def main() -> int:
    """Run everything; what it says stands in benchmarks/results, too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu", metavar="DIR")
    parser.add_argument(
        "--googletest", type=Path, default=ROOT / "build" / "carry" / "googletest", metavar="DIR"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR"
    )
    arguments = parser.parse_args()
    check = Check(arguments.build.resolve(), (arguments.build / "results").resolve())
    check.results.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    print(*(f"{name:15}{value}" for name, value in machine.items()), sep="\n")

    rows: list[object] = []
    if build(check, arguments.googletest.resolve()):
        test(check)
        if torch.cuda.is_available():
            rows = measure(check)
            sanitize(check)
    content = {"machine": machine, "steps": [asdict(s) for s in check.steps], "rows": rows}
    name = re.sub(r"\W+", "-", machine["device"]).strip("-").lower()
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nWritten: {path}")
    if not torch.cuda.is_available():
        print("cuda: no device, so that this has shown no more than that all of it builds")
        return 1
    return int(any(step.status.startswith("failed") for step in check.steps))


if __name__ == "__main__":
    sys.exit(main())
