# SPDX-License-Identifier: Apache-2.0
"""Which steps scripts/gpu_check.py runs if others fail, and when it uses what was carried."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

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
    gpu_check.check_all(check, gpu_check.ON_GPU, folder / "carry", has_device=False)
    return check.commands


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
    assert sum(gpu_check.LIMITS.values()) < MOST_SECONDS


def test_suites_run_if_the_package_is_not_built(tmp_path: Path) -> None:
    found = steps(tmp_path, "build")

    assert list(found) == ["configure", "build", "build-suites", *gpu_check.SUITES]


@pytest.mark.usefixtures("site")
def test_the_package_is_tested_if_suites_are_not_built(tmp_path: Path) -> None:
    found = steps(tmp_path, "build-suites")

    assert "python" in found
    assert not set(gpu_check.SUITES) & set(found)


def test_carried_suites_run_if_nothing_can_be_built(tmp_path: Path) -> None:
    carry(tmp_path, gpu_check.description_of_suites())

    found = steps(tmp_path, "configure")

    assert list(found) == ["configure", *gpu_check.SUITES]
    assert found["cuda_kernels_test"][0] == str(tmp_path / "carry" / "cuda_kernels_test")


@pytest.mark.parametrize(("ours", "status"), [(False, 0), (True, 1)])
def test_suites_of_other_sources_or_systems_are_built_again(
    tmp_path: Path, *, ours: bool, status: int
) -> None:
    description = gpu_check.description_of_suites() if ours else "sm_90 of other sources"
    carry(tmp_path, description, status=status)

    found = steps(tmp_path, "build")

    assert "build-suites" in found
    assert found["cuda_kernels_test"][0] != str(tmp_path / "carry" / "cuda_kernels_test")
