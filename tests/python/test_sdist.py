# SPDX-License-Identifier: Apache-2.0
"""The source distribution has what a build reads."""

import subprocess
import tarfile
from pathlib import Path, PurePath

import pytest
from scikit_build_core.build import build_sdist

ROOT = Path(__file__).parents[2]

BUILT_FROM = (
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "cmake",
    "normscope",
    "pyproject.toml",
    "python",
)


def test_it_has_every_file_that_a_build_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    tracked = subprocess.run(
        ["git", "ls-files", *BUILT_FROM], capture_output=True, text=True, check=True
    ).stdout.splitlines()

    name = build_sdist(str(tmp_path))

    with tarfile.open(tmp_path / name) as archive:
        packed = {str(PurePath(*PurePath(path).parts[1:])) for path in archive.getnames()}
    assert {PurePath(path).parts[0] for path in tracked} == set(BUILT_FROM)
    assert set(tracked) - packed == set()
    # Neither builds nor environments.
    assert not {PurePath(path).parts[0] for path in packed if path != "."} & {"build", ".venv"}
