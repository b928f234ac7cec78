# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels in the installed wheel; scripts/test_wheel.sh names the wheel's file."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import normscope

MOST_BYTES = 12_000_000  # of the whole wheel

LIBRARIES = sorted(Path(normscope.__file__).parent.glob("*.so.*"))


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cuda_line() -> str:
    """Return what the command says of the kernels."""
    text = output_of(sys.executable, "-m", "normscope")
    return next(
        line.removeprefix("cuda").strip() for line in text.splitlines() if line.startswith("cuda ")
    )


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_they_are_there_if_nvcc_is_at_hand() -> None:
    if shutil.which("nvcc") is None:
        assert cuda_line() == "not built"
    elif has_driver():
        assert cuda_line().startswith("built")
    else:
        assert cuda_line() == "built, but the device cannot run it: there is no driver"


def test_an_old_driver_is_found_when_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "driver.c"
    source.write_text("int cuDriverGetVersion(int* version) { *version = 11040; return 0; }")
    output_of("cc", "-shared", "-fPIC", source, "-o", tmp_path / "libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path), prepend=os.pathsep)

    line = cuda_line()

    assert line == "not built" or "the driver is for CUDA 11.4, which is older than" in line


def test_the_wheel_is_small() -> None:
    assert Path(os.environ["NORMSCOPE_TEST_WHEEL"]).stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_no_library_of_cuda_is_needed(library: Path) -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "--dynamic", "--wide", library))

    assert "libc.so.6" in needed
    assert [name for name in needed if re.match("lib(cu|nv|nccl|torch_cuda|c10_cuda)", name)] == []


# Otherwise torch's runtime, which is loaded first, would be called in their place.
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_the_runtime_inside_is_hidden(library: Path) -> None:
    symbols = re.findall(
        r"(\d+|UND) (cuda\w*)", output_of("readelf", "--dyn-syms", "--wide", library)
    )

    assert symbols == []
