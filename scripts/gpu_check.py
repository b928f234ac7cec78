# SPDX-License-Identifier: Apache-2.0
"""Builds normscope for the GPUs of this machine, tests and measures it, and writes the results.

Needs a C++20 compiler, CMake, ninja, nvcc, and a Python with a CUDA build of torch and pytest, but
no network. `make carry` prepares build/carry on another machine, whose contents are used if they
are there: GoogleTest's sources, in case it is not installed, the contract suites, if they were
built from these sources for the GPU's architecture, and an NCCL that lets ranks share a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import torch

from count_tests import describe, outcome

ROOT = Path(__file__).resolve().parent.parent

# Seconds for all steps.
TOTAL = 590

# The time limit of each step in seconds, TOTAL together. A slow step does not use up the time of
# the others. An H200 with 16 cores took 388 s.
LIMITS = {
    "configure": 20,
    "build": 100,
    "install": 5,
    "describe": 15,
    "python": 105,
    "programs": 95,
    "layers": 30,
    "networks": 70,
    "build-suites": 45,
    "cuda_kernels_test": 55,
    "cuda_batch_norm_test": 15,
    "compute-sanitizer-memcheck": 15,
    "compute-sanitizer-racecheck": 20,
}
BUILDS = ("configure", "build", "install", "build-suites")

# The same of several ranks, which come last and take what the others have left of TOTAL.
LAST_LIMITS = {"ranks": 90, "programs-of-ranks": 75, "data-parallel": 75}

# No step is started with less.
LEAST = 5

# Cases to run under compute-sanitizer, which slows down kernels by a factor of a hundred.
SANITIZED = "*FollowTheSpecification/*_float32_channels_*"


def limit_of(name: str, used: float) -> float:
    """Return the time limit of a step, after the others have used so many seconds."""
    return LIMITS[name] if name in LIMITS else max(0.0, min(LAST_LIMITS[name], TOTAL - used))


@dataclass
class Step:
    """A command and its outcome."""

    name: str
    command: list[str]
    status: str = "not run"
    seconds: float = 0.0
    tests: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Clock:
    """A clock that measures the steps.

    Args:
        seconds: Returns the seconds so far.
        slack: A step may take this multiple of its limit, by this clock.
        patience: A step is stopped after this multiple of its limit, in elapsed time.
    """

    seconds: Callable[[], float]
    slack: float = 1.0
    patience: float = 1.0


def _processor_seconds() -> float:
    """Return the processor time of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


WALL = Clock(time.monotonic)

# A machine without a GPU also runs other programs, which slow down a step, and processors differ.
PROCESSOR = Clock(_processor_seconds, slack=4.0, patience=8.0)


class Check:
    """Runs steps, each within its time limit, and writes the results after each step."""

    def __init__(
        self, build: Path, output: Path, machine: Mapping[str, str], cores: int, clock: Clock
    ) -> None:
        self.build = build
        self._clock = clock
        self.results = build / "results"
        self.results.mkdir(parents=True, exist_ok=True)
        self.steps: list[Step] = []
        self.figures: dict[str, object] = {}
        self._slowness = max(1.0, 16 / cores)
        self._used = 0.0  # as on a machine that is not slow
        self._machine = machine
        output.mkdir(parents=True, exist_ok=True)
        number = machine.get("devices", "1")
        several = f"{number} " if number not in ("0", "1") else ""
        name = re.sub(r"\W+", "-", several + machine["device"]).strip("-").lower()
        self.path = output / f"{name}.json"

    def run(
        self,
        name: str,
        command: Sequence[str],
        junit: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> bool:
        """Run a command; write its output to a log file and its outcome to the results."""
        slowness = self._slowness if name in BUILDS else 1.0
        limit = limit_of(name, self._used) * slowness
        if limit < LEAST:
            self.leave_out(name, "left out: the other steps took the time")
            return False
        parts = [str(part) for part in command]
        step = Step(name, [_without_paths(part) for part in parts])
        self.steps.append(step)
        print(f"{name} ...", end=" ", flush=True)
        start = self._clock.seconds()
        log = self.results / f"{name}.log"
        with log.open("w") as output:
            patience = limit * self._clock.patience
            code = _run_within(patience, parts, environment or {}, output)
        step.seconds = round(self._clock.seconds() - start, 1)
        self._used += step.seconds / slowness / self._clock.slack
        if code == 0 and step.seconds > limit * self._clock.slack:
            code = "too slow"
        step.status = "passed" if code == 0 else f"failed ({code})"
        if junit is not None and junit.exists():
            _count_tests(step, junit)
        if code != 0:
            step.tail = log.read_text(errors="replace").splitlines()[-60:]
        print(
            f"{step.status} in {step.seconds:.0f} of {limit:.0f} s {step.tests or ''}", flush=True
        )
        for line in [*step.failed[:20], *step.tail[-30:]]:
            print(f"    {line}")
        self.write()
        return code == 0

    def leave_out(self, name: str, reason: str) -> None:
        """Write that a step does not run, and why."""
        print(f"{name} ... {reason}", flush=True)
        self.steps.append(Step(name, [], status=reason))
        self.write()

    def write(self) -> None:
        """Write the results so far."""
        content = {
            "machine": self._machine,
            "steps": [asdict(step) for step in self.steps],
            **self.figures,
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def failed(self) -> bool:
        """Whether any step has failed."""
        return any(step.status.startswith("failed") for step in self.steps)


def _without_paths(part: str) -> str:
    """Return a part of a command, without what differs between machines."""
    return part.replace(sys.executable, "python3").replace(f"{ROOT}/", "").replace(str(ROOT), ".")


def _run_within(
    seconds: float, command: list[str], environment: Mapping[str, str], output: IO[str]
) -> int | str:
    """Run a command, end its children too, which would slow down others; return its status."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | dict(environment),
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _count_tests(step: Step, junit: Path) -> None:
    cases = list(ElementTree.parse(junit).iter("testcase"))
    step.tests = dict(Counter(map(outcome, cases)))
    step.failed = [describe(case) for case in cases if outcome(case) == "failed"]


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"


def describe_machine() -> dict[str, str]:
    """Return the device, and the versions of its software."""
    release = re.search(r"release [\d.]+, V[\d.]+", _output_of("nvcc", "--version"))
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "devices": str(torch.cuda.device_count()),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": release.group() if release else "unknown",
        "torch": str(torch.__version__),
        "cuda of torch": str(torch.version.cuda),
        "nccl of torch": ".".join(map(str, nccl)),
        "python": sys.version.split()[0],
    }


def architecture() -> str:
    """Return the architecture of the GPU, or that of an H100 and H200 if there is none."""
    if not torch.cuda.is_available():
        return "90"
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


@dataclass(frozen=True)
class Way:
    """What to build and test: for the GPU of this machine, or with the CPU in its place."""

    options: tuple[str, ...]
    library: str
    suites: tuple[str, str]
    site: str  # folder of the package normscope, in the build's
    device: str = "cuda"
    environment: dict[str, str] = field(default_factory=dict)


ON_GPU = Way(
    options=("-DNORMSCOPE_BUILD_CUDA=ON", f"-DNORMSCOPE_CUDA_ARCHITECTURES={architecture()}"),
    library="normscope_torch",
    suites=("cuda_kernels_test", "cuda_batch_norm_test"),
    site="site",
)
IN_ITS_PLACE = Way(
    options=("-DNORMSCOPE_BUILD_CUDA=OFF",),
    library="normscope_torch_on_host",
    suites=("cuda_kernels_stand_in_test", "cuda_batch_norm_stand_in_test"),
    site="tests/torch_on_host/site",
    device="cpu",
    environment={"NORMSCOPE_TEST_DEVICE": "cpu"},
)


SUITES = ("cuda_kernels_test", "cuda_batch_norm_test")
SOURCES = {".cmake", ".cpp", ".cu", ".cuh", ".h", ".inc", ".txt"}


def description_of_suites() -> str:
    """Return what suites are built from: the architecture, and a hash of the C++ sources."""
    digest = hashlib.sha256()
    files = [ROOT / "CMakeLists.txt"]
    for folder in ("cmake", "normscope", "tests"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    for path in sorted(files):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return f"sm_{architecture()} {digest.hexdigest()}"


def carried_suites(carry: Path) -> list[Path]:
    """Return the suites that were built elsewhere, if they are those of this machine."""
    description = carry / "suites.txt"
    if not description.exists() or description.read_text().strip() != description_of_suites():
        return []
    suites = [carry / name for name in SUITES]
    # The libraries of this machine may be older than those that they were linked to.
    works = all(_succeeds(str(suite), "--gtest_list_tests") for suite in suites)
    return suites if works else []


def configure(check: Check, way: Way, googletest: Path) -> bool:
    """Configure the build."""
    carried = [f"-DNORMSCOPE_GOOGLETEST={googletest}"] if googletest.is_dir() else []
    return check.run(
        "configure",
        [
            *("cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(check.build), *way.options),
            *("-DNORMSCOPE_BUILD_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}", *carried),
        ],
    )


def build(check: Check, way: Way) -> bool:
    """Build the library as a Python package."""
    if not check.run("build", build_command(check, way.library)):
        return False
    if way is IN_ITS_PLACE:  # its build makes the package
        return True
    site = check.build / way.site
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


def build_command(check: Check, *targets: str) -> list[str]:
    """Build some targets."""
    return ["cmake", "--build", str(check.build), "--target", *targets]


def test_package(check: Check, way: Way) -> None:
    """Run the Python tests on the device."""
    environment = {"PYTHONPATH": str(check.build / way.site), **way.environment}
    check.run("describe", [sys.executable, "-m", "normscope"], environment=environment)
    files = {"python": ("cuda", "portable"), "programs": ("programs",)}
    for name, tests in files.items():
        junit = check.results / f"{name}.xml"
        check.run(name, pytest_command("cuda and not nccl", tests, junit), junit, environment)


def pytest_command(marks: str, tests: Sequence[str], junit: Path) -> list[str]:
    """Run the tests with some marks."""
    return [
        *(sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider"),
        *("-W", "default"),  # torch's own warnings do not matter here
        *(f"tests/python/test_{test}.py" for test in tests),
        f"--junitxml={junit}",
    ]


# What lets ranks share a GPU, from this release of NCCL on. Kernels of ranks wait for each other,
# so all of them must fit on the GPU at once.
FIRST_TO_SHARE = (2, 30)
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass(frozen=True)
class Ranks:
    """How several ranks run over NCCL.

    Args:
        number: The ranks of the benchmark.
        variables: The environment of the tests.
        left_out: Why the tests do not run, if they do not.
    """

    number: int
    variables: dict[str, str] = field(default_factory=dict)
    left_out: str = ""


def ranks_on(
    gpus: int, version: tuple[int, ...], library: Path | None, why_no_library: str
) -> Ranks:
    """Return how several ranks run.

    Args:
        gpus: The number of GPUs; with 0, the CPU is in their place.
        version: That of torch's NCCL.
        library: Another NCCL that lets ranks share a GPU.
        why_no_library: Why there is none.
    """
    if gpus != 1:  # one rank for each GPU
        return Ranks(gpus or 2)
    if version >= FIRST_TO_SHARE:
        return Ranks(1, SHARING)
    if library is not None:
        return Ranks(1, {"LD_PRELOAD": str(library), **SHARING})
    needed = f"one GPU, and torch's NCCL is older than {'.'.join(map(str, FIRST_TO_SHARE))}"
    return Ranks(1, left_out=f"left out: {needed}; NCCL in build/carry: {why_no_library}")


def carried_nccl(carry: Path, folder: Path) -> tuple[Path | None, str]:
    """Unpack the NCCL that was carried into a folder; return it, or None and the reason."""
    packed = carry / f"libnccl-sm_{architecture()}.so.xz"
    if not packed.exists():
        described = carry / "nccl.txt"
        return None, described.read_text().strip() if described.exists() else "none"
    library = folder / "libnccl.so.2"
    try:
        with lzma.open(packed) as source, library.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (OSError, EOFError, lzma.LZMAError) as error:
        return None, f"{packed.name}: {error}"
    load = f"import ctypes; ctypes.CDLL({str(library)!r}).ncclGetVersion"
    if not _succeeds(sys.executable, "-c", load):
        return None, f"{packed.name} cannot be loaded"
    return library, ""


def test_ranks(check: Check, way: Way, ranks: Ranks) -> None:
    """Run the Python tests of several ranks over NCCL, and compare networks that they train."""
    environment = {"PYTHONPATH": str(check.build / way.site), **way.environment}
    files = {"ranks": ("cuda", "portable"), "programs-of-ranks": ("programs",)}
    for name, tests in files.items():
        if ranks.left_out:
            check.leave_out(name, ranks.left_out)
            continue
        junit = check.results / f"{name}.xml"
        variables = [f"{variable}={value}" for variable, value in ranks.variables.items()]
        command = ["env", *variables, *pytest_command("cuda and nccl", tests, junit)]
        check.run(name, command, junit, environment)
    figures = check.results / "gpu_data_parallel.json"
    figures.unlink(missing_ok=True)
    check.run(
        "data-parallel",
        [
            *(sys.executable, "benchmarks/gpu_data_parallel.py", "--json", str(figures)),
            *("--ranks", str(ranks.number), "--device", way.device),
            # Less than two GPUs only show that it runs.
            *(["--quick"] if ranks.number < 2 or way is IN_ITS_PLACE else []),
        ],
        # The kernels in their place take minutes for a network: the installed package's are faster.
        environment=environment if way is ON_GPU else None,
    )
    if figures.exists() and way is ON_GPU:
        check.figures["data-parallel"] = json.loads(figures.read_text())
        check.write()


def build_suites(check: Check, way: Way) -> list[Path]:
    """Build the contract suites; return the executables, or nothing if that failed."""
    if not check.run("build-suites", build_command(check, *way.suites)):
        return []
    folders = ("kernels", "batch_norm")
    return [check.build / "tests" / f / s for f, s in zip(folders, way.suites, strict=True)]


def test_suites(check: Check, suites: Sequence[Path]) -> None:
    """Run the contract suites on the device, which take longest."""
    for name, executable in zip(SUITES, suites, strict=True):
        junit = check.results / f"{name}.xml"
        check.run(name, [str(executable), f"--gtest_output=xml:{junit}"], junit)


def sanitize(check: Check, kernels_test: Path) -> None:
    """Run a subset under compute-sanitizer, if it is installed."""
    if shutil.which("compute-sanitizer") is None:
        check.leave_out("compute-sanitizer", "not installed")
        return
    for tool in ("memcheck", "racecheck"):
        check.run(
            f"compute-sanitizer-{tool}",
            [
                *("compute-sanitizer", "--tool", tool, "--error-exitcode", "1"),
                *(str(kernels_test), f"--gtest_filter={SANITIZED}"),
            ],
        )


def measure(check: Check) -> None:
    """Run the benchmarks."""
    for name in ("layers", "networks"):
        figures = check.results / f"gpu_{name}.json"
        check.run(
            name,
            [sys.executable, f"benchmarks/gpu_{name}.py", "--json", str(figures)],
            environment={"PYTHONPATH": str(check.build / ON_GPU.site)},
        )
        if figures.exists():
            check.figures[name] = json.loads(figures.read_text())
            check.write()


def check_all(check: Check, way: Way, carry: Path, ranks: Ranks, *, has_device: bool) -> None:
    """Run every step that the steps before it allow."""
    is_configured = configure(check, way, carry / "googletest")
    is_built = is_configured and build(check, way)
    if is_built:
        test_package(check, way)
        if has_device:
            measure(check)
    suites = carried_suites(carry) if way is ON_GPU else []
    if not suites and is_configured:
        suites = build_suites(check, way)
    if suites:
        test_suites(check, suites)
        if has_device:
            sanitize(check, suites[0])
    if is_built and (has_device or way is IN_ITS_PLACE):
        test_ranks(check, way, ranks)


def main() -> int:
    """Run everything, and write the results to the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu", metavar="DIR")
    parser.add_argument("--carry", type=Path, default=ROOT / "build" / "carry", metavar="DIR")
    parser.add_argument(
        "--describe-suites",
        action="store_true",
        help="only print what suites would be built from, for `make carry`",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="without a GPU: the kernels run on the host, the tests within their limits",
    )
    arguments = parser.parse_args()
    if arguments.describe_suites:
        print(description_of_suites())
        return 0
    way = IN_ITS_PLACE if arguments.dry_run else ON_GPU
    machine = describe_machine()
    print(*(f"{name:15}{value}" for name, value in machine.items()), sep="\n")
    clock = PROCESSOR if arguments.dry_run else WALL
    check = Check(arguments.build.resolve(), arguments.output, machine, os.cpu_count() or 1, clock)

    has_device = torch.cuda.is_available() and not arguments.dry_run
    carry = arguments.carry.resolve()
    gpus = torch.cuda.device_count() if has_device else 0
    version = torch.cuda.nccl.version() if has_device else ()
    needs_library = gpus == 1 and version < FIRST_TO_SHARE
    library, why = carried_nccl(carry, check.results) if needs_library else (None, "")
    check_all(check, way, carry, ranks_on(gpus, version, library, why), has_device=has_device)
    print(f"\nWritten: {check.path}")
    if not torch.cuda.is_available() and not arguments.dry_run:
        print("cuda: no device; this only shows that everything builds")
        return 1
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
