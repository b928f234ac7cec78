# SPDX-License-Identifier: Apache-2.0
"""Which steps scripts/gpu_check.py runs, with how many ranks, and when it uses what was carried."""

from __future__ import annotations

import lzma
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

import gpu_ranks
import pytest
import torch
from rank_pool import RankPool

import carry_nccl
import gpu_check

# Of the machines on which it runs: ten minutes for a command.
MOST_SECONDS = 600


class Steps(gpu_check.Check):
    """Runs nothing; the steps with the given names fail."""

    def __init__(self, folder: Path, failing: Collection[str] = ()) -> None:
        super().__init__(folder / "build", folder, {"device": "none"}, 16, gpu_check.WALL)
        self.failing = failing
        self.commands: dict[str, Sequence[str]] = {}

    def run(self, name: str, command: Sequence[str], *_: object, **__: object) -> bool:
        self.commands[name] = command
        return name not in self.failing


def steps(folder: Path, *failing: str) -> dict[str, Sequence[str]]:
    check = Steps(folder, failing)
    ranks = gpu_check.Ranks(1)
    gpu_check.check_all(check, gpu_check.ON_GPU, folder / "carry", ranks, has_device=False)
    return check.commands


def steps_of(ranks: gpu_check.Ranks, folder: Path) -> Steps:
    check = Steps(folder)
    gpu_check.test_ranks(check, gpu_check.ON_GPU, ranks)
    return check


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.copytree", lambda *_, **__: None)


def carry(folder: Path, description: str, *, status: int = 0) -> None:
    """Carry suites that exit with a status."""
    (folder / "carry").mkdir()
    (folder / "carry" / "suites.txt").write_text(description + "\n")
    for name in gpu_check.SUITES:
        (folder / "carry" / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (folder / "carry" / name).chmod(0o755)


def test_all_steps_have_time() -> None:
    assert sum(gpu_check.LIMITS.values()) <= gpu_check.TOTAL < MOST_SECONDS


@pytest.mark.parametrize(("used", "limit"), [(390, 90), (530, 60), (600, 0)])
def test_steps_of_ranks_get_the_time_that_is_left(used: float, limit: float) -> None:
    assert gpu_check.limit_of("ranks", used) == limit
    assert gpu_check.limit_of("build", used) == gpu_check.LIMITS["build"]


SUITES = [*gpu_check.SUITES]
OF_PACKAGE = ["install", "describe", "python", "programs"]
OURS = gpu_check.description_of_suites()


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("failing", "carried", "status", "expected"),
    [
        ("build", None, 0, ["configure", "build", "build-suites", *SUITES]),
        ("build-suites", None, 0, ["configure", "build", *OF_PACKAGE, "build-suites"]),
        ("configure", OURS, 0, ["configure", *SUITES]),
        # Suites of other sources, and for another system.
        ("build", "sm_90 of others", 0, ["configure", "build", "build-suites", *SUITES]),
        ("build", OURS, 1, ["configure", "build", "build-suites", *SUITES]),
    ],
)
def test_what_could_be_built_or_was_carried_runs(
    tmp_path: Path, failing: str, carried: str | None, status: int, expected: list[str]
) -> None:
    if carried is not None:
        carry(tmp_path, carried, status=status)

    found = steps(tmp_path, failing)

    assert list(found) == expected
    for name in set(SUITES) & set(expected):
        is_carried = found[name][0] == str(tmp_path / "carry" / name)
        assert is_carried == ("build-suites" not in expected)


LIBRARY = Path("libnccl.so.2")
OLD, NEW = (2, 28, 9), (2, 30, 4)


@pytest.mark.parametrize(
    ("gpus", "version", "library", "number", "variables"),
    [
        (8, OLD, None, 8, {}),
        (2, NEW, None, 2, {}),
        (1, NEW, None, 1, gpu_check.SHARING),
        (1, OLD, LIBRARY, 1, {"LD_PRELOAD": "libnccl.so.2", **gpu_check.SHARING}),
        (0, (), None, 2, {}),  # the CPU is in their place
    ],
)
def test_there_is_a_rank_for_each_gpu_or_nccl_shares_one(
    tmp_path: Path,
    gpus: int,
    version: tuple[int, ...],
    library: Path | None,
    number: int,
    variables: dict[str, str],
) -> None:
    ranks = gpu_check.ranks_on(gpus, version, library, "none")
    commands = steps_of(ranks, tmp_path).commands

    assert ranks == gpu_check.Ranks(number, variables)
    assert list(commands) == list(gpu_check.LAST_LIMITS)
    assert str(number) in commands["data-parallel"]
    assert ("--quick" in commands["data-parallel"]) == (number < 2)
    of_tests = [f"{name}={value}" for name, value in variables.items()]
    for name, command in commands.items():
        given = [part for part in command if part.startswith(("NCCL_", "LD_"))]
        assert given == (of_tests if name != "data-parallel" else [])


def test_tests_of_ranks_are_left_out_with_a_reason(tmp_path: Path) -> None:
    check = steps_of(gpu_check.ranks_on(1, OLD, None, "left out: too large"), tmp_path)

    assert list(check.commands) == ["data-parallel"]  # by one rank, which shows that it runs
    assert {"--quick", "1"} <= set(check.commands["data-parallel"])
    assert [step.name for step in check.steps] == ["ranks", "programs-of-ranks"]
    for step in check.steps:
        assert step.status == (
            "left out: one GPU, and torch's NCCL is older than 2.30; NCCL in build/carry: "
            "left out: too large"
        )
    assert not check.failed


def test_a_step_without_time_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TOTAL", 0)
    check = gpu_check.Check(tmp_path, tmp_path, {"device": "none"}, 16, gpu_check.WALL)

    assert not check.run("ranks", ["false"])

    assert [step.status for step in check.steps] == ["left out: the other steps took the time"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "left out: it is too large"),
        (b"cut off", "Input format not supported"),
        (lzma.compress(b"no library"), "cannot be loaded"),
    ],
)
def test_a_carried_nccl_that_cannot_be_used_is_told(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    (tmp_path / "nccl.txt").write_text("left out: it is too large\n")
    if content is not None:
        packed = tmp_path / f"libnccl-sm_{gpu_check.architecture()}.so.xz"
        packed.write_bytes(content)

    library, why = gpu_check.carried_nccl(tmp_path, tmp_path)

    assert library is None
    assert reason in why


@pytest.mark.parametrize(
    ("ranks", "gpus", "version", "shared", "runs"),
    [
        (2, 2, OLD, False, True),
        (3, 2, OLD, False, False),
        (2, 1, NEW, False, False),
        (2, 1, OLD, True, False),
        (3, 1, NEW, True, True),
        (4, 1, NEW, True, False),
        (1, 0, (), False, False),
    ],
)
def test_a_test_is_skipped_if_nccl_connects_fewer_ranks(
    ranks: int, gpus: int, version: tuple[int, ...], *, shared: bool, runs: bool
) -> None:
    reason = gpu_ranks.reason_to_skip(ranks, gpus, version, shared=shared)

    assert (reason is None) == runs
    assert reason is None or reason.startswith(f"cuda: {ranks} ranks over NCCL need as many GPUs")


def test_ranks_without_gpus_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMSCOPE_TEST_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_ranks, "loaded_nccl", lambda: OLD)

    with pytest.raises(pytest.skip.Exception, match=r"here are 1 GPUs and NCCL 2\.28\.9"):
        RankPool(backend="nccl").run(2, print)


def test_nccl_is_told_to_share_gpus_by_the_same_rule() -> None:
    assert gpu_ranks.FIRST_TO_SHARE == gpu_check.FIRST_TO_SHARE
    assert gpu_check.SHARING[gpu_ranks.SHARE_GPUS] == "1"


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    """Return device code as CUDA's libraries contain it."""
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12)
    return (header + struct.pack("<I", architecture)).ljust(64, b"\0") + code


def container(*entries: bytes) -> bytes:
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def test_device_code_of_other_gpus_is_not_carried() -> None:
    ours, theirs, ptx = entry(2, 90, b"sm_90..."), entry(2, 80, b"sm_80..."), entry(1, 90, b"ptx")
    only_theirs = container(theirs)
    library = b"host" + container(theirs, ours, ptx) + b"code" + only_theirs

    kept = carry_nccl.without_other_architectures(library, 90)

    rest = bytes(len(theirs) + len(ptx))
    assert kept == b"host" + container(ours) + rest + b"code" + only_theirs
    with pytest.raises(ValueError, match="expected code for sm_120"):
        carry_nccl.without_other_architectures(library, 120)


@pytest.mark.parametrize(("most", "outcome"), [(1 << 20, "NCCL 2.32.3 for"), (0, "left out: NCCL")])
def test_nccl_is_carried_if_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, outcome: str
) -> None:
    library = container(entry(2, 90, b"sm_90..."))
    monkeypatch.setattr(carry_nccl, "download", lambda _: ("2.32.3", library))
    monkeypatch.setattr(carry_nccl, "MOST_BYTES", most)

    assert carry_nccl.carry(tmp_path, 90).startswith(outcome)

    packed = tmp_path / "libnccl-sm_90.so.xz"  # where gpu_check.py looks for it
    assert packed.exists() == (most > 0)
    assert not most or lzma.decompress(packed.read_bytes()) == library
