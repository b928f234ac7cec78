# SPDX-License-Identifier: Apache-2.0
"""How the library that was compiled is loaded, and the errors for another release of torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normscope
from normscope._binding.load import load

ROOT = Path(__file__).parents[2]
PACKAGE = Path(normscope.__file__).parent
RELEASE = torch.__version__.partition("+")[0]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package whose version file can be changed."""
    package = tmp_path / "normscope"
    package.mkdir()
    for path in PACKAGE.iterdir():
        if path.name != "torch_version.txt":
            (package / path.name).symlink_to(path)
    return package


def test_the_package_knows_the_torch_that_it_was_compiled_with() -> None:
    assert (PACKAGE / "torch_version.txt").read_text() == f"{RELEASE}\n"


def test_another_release_of_torch_is_refused_on_import(package: Path) -> None:
    (package / "torch_version.txt").write_text("2.10.0\n")

    run = subprocess.run(
        [sys.executable, "-c", "import normscope"],
        capture_output=True,
        text=True,
        check=False,
        cwd=package.parent,  # packages in this folder take precedence
    )

    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ImportError: normscope: expected torch 2.10.0, which it was compiled with, "
        f"got torch {torch.__version__}. To compile it for this torch, run in normscope's source "
        "directory: pip install --force-reinstall --no-deps ."
    )


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_other_builds_of_the_same_release_are_accepted(package: Path, build: str) -> None:
    (package / "torch_version.txt").write_text(f"{RELEASE}{build}\n")

    load(package)


def test_a_copy_that_an_extension_has_loaded_is_used(tmp_path: Path) -> None:
    for library in PACKAGE.glob("lib*"):
        shutil.copy(library, tmp_path)
    program = (
        "import sys, torch\n"
        "torch.ops.load_library(sys.argv[1])\n"
        "import normscope\n"
        "print(normscope.BatchNorm1d(3)(torch.randn(4, 3)).shape)\n"
    )
    [copy] = tmp_path.glob("libnormscope_torch.so.*")

    run = subprocess.run(
        [sys.executable, "-c", program, copy], capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout == "torch.Size([4, 3])\n"


@pytest.mark.parametrize("compiled_with", [RELEASE, None])
def test_the_error_of_a_library_that_does_not_load_has_both_versions(
    tmp_path: Path, compiled_with: str | None
) -> None:
    (tmp_path / "libnormscope_torch.so.0").write_text("no library")
    if compiled_with:
        (tmp_path / "torch_version.txt").write_text(f"{compiled_with}\n")
    known = compiled_with or "of an unknown release"

    with pytest.raises(ImportError) as raised:
        load(tmp_path)

    text = str(raised.value)
    assert f"compiled with torch {known}, its library does not load into torch {RELEASE}" in text
    assert "libnormscope_torch.so.0: " in text
    assert isinstance(raised.value.__cause__, OSError)


def configure(folder: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """Run commands of CMake that may call what finds torch."""
    script = folder / "configure.cmake"
    script.write_text(f"include({ROOT}/cmake/NormscopeTorch.cmake)\n{commands}")
    return subprocess.run(["cmake", "-P", script], capture_output=True, text=True, check=False)


def test_a_build_finds_the_torch_outside_of_an_isolated_environment(tmp_path: Path) -> None:
    # As pip does it: a folder in PYTHONPATH hides what is installed.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [path for path in sys.path if 'site-packages' not in path]\n"
    )
    commands = (
        f"set(Python_EXECUTABLE {sys.executable})\n"
        f"set(ENV{{PYTHONPATH}} {tmp_path})\n"
        "normscope_find_torch_of_python()\n"
        "message(NOTICE ${Torch_DIR})\n"
    )

    run = configure(tmp_path, commands)

    installed = Path(torch.__file__).parent / "share" / "cmake" / "Torch"
    assert run.returncode == 0, run.stderr
    assert run.stderr.strip() == str(installed)


@pytest.mark.parametrize(
    ("cuda", "told"),
    [
        ("'13.0'", ""),
        ("'12.8'", "expected nvcc 12.x, as torch was built with CUDA 12.8, got 13.0.88"),
        ("None", ""),
    ],
)
def test_a_toolkit_of_another_major_version_than_torch_s_is_refused(
    tmp_path: Path, cuda: str, told: str
) -> None:
    torch_dir = tmp_path / "share" / "cmake" / "Torch"
    torch_dir.mkdir(parents=True)
    (tmp_path / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda}\n")
    commands = (
        f"set(Torch_DIR {torch_dir})\n"
        "set(CUDAToolkit_VERSION 13.0.88)\n"
        "set(CUDAToolkit_VERSION_MAJOR 13)\n"
        "normscope_check_cuda_of_torch()\n"
    )

    run = configure(tmp_path, commands)

    assert (run.returncode != 0) == bool(told), run.stderr
    assert told in re.sub(r"\s+", " ", run.stderr)


def test_a_build_without_torch_first_says_what_to_do(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without site-packages
    python.chmod(0o755)

    run = configure(tmp_path, f"set(Python_EXECUTABLE {python})\nnormscope_find_torch()\n")

    assert run.returncode != 0
    told = re.sub(r"\s+", " ", run.stderr)
    assert re.search(r'\(message\): Type "pip install torch" and then "pip install \."', told)
    assert f"{python} has none." in told
