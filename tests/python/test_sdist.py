# SPDX-License-Identifier: Apache-2.0
"""The source distribution contains the files that a build needs."""

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


@pytest.mark.slow
def test_it_contains_every_file_that_a_build_needs(
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
    # It contains neither build folders nor virtual environments.
    assert not {PurePath(path).parts[0] for path in packed if path != "."} & {"build", ".venv"}
