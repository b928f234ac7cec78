# SPDX-License-Identifier: Apache-2.0
"""python -m normscope, and the choice of kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normscope
from normscope import _library


def run_module(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "normscope"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_prints_versions_kernels_and_communicators() -> None:
    output = run_module().stdout

    assert normscope.__version__ in output
    assert torch.__version__ in output
    assert all(name in output for name in _library.available_kernels())
    assert "shared memory" in output
    assert "gloo" in output


def test_it_says_cuda_is_not_built_where_no_library_holds_a_kernel() -> None:
    libraries = Path(_library.__file__).parent.glob("*.so*")
    has_kernels = any(b"add_tiles_channels_first" in path.read_bytes() for path in libraries)

    output = run_module().stdout

    assert ("\ncuda           not built\n" in output) == (not has_kernels)


@pytest.mark.parametrize("name", _library.available_kernels())
def test_the_environment_chooses_the_kernels(name: str) -> None:
    assert f"in use: {name}\n" in run_module(NORMSCOPE_KERNELS=name).stdout


def test_unknown_kernels_are_refused_with_the_names_that_exist() -> None:
    result = run_module(NORMSCOPE_KERNELS="abacus")

    assert result.returncode != 0
    assert 'got "abacus"' in result.stderr
    assert "reference" in result.stderr
