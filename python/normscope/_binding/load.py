# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ library on import, and refuses a torch that it was not compiled with."""

import ctypes
import os
import re
from pathlib import Path

import torch

# CMake writes torch's version, for example 2.13.0, to this file next to the library.
_VERSION_FILE = "torch_version.txt"

_REMEDY = (
    "To compile it for this torch, run in normscope's source directory: "
    "pip install --force-reinstall --no-deps ."
)


def load(directory: Path) -> None:
    """Load the library if it was compiled with this release of torch, and is not loaded yet.

    torch's C++ interface changes between releases: a different release might load the library and
    then call it incorrectly. Different builds of the same release (CPU, CUDA) are accepted if the
    library loads.

    Args:
        directory: The directory that contains the library.

    Raises:
        ImportError: If it was compiled with another release, or this build of torch cannot load it.
    """
    # The file name ends with the version.
    [library] = directory.glob("libnormscope_torch.so.*")
    file = directory / _VERSION_FILE
    # The file is missing if the package was not installed by CMake.
    compiled_with = file.read_text().strip() if file.exists() else None
    if compiled_with is not None and _release(compiled_with) != _release(torch.__version__):
        raise ImportError(
            f"normscope: expected torch {compiled_with}, which it was compiled with, "
            f"got torch {torch.__version__}. {_REMEDY}"
        )
    if _is_loaded(library.name):
        return
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        release = compiled_with or "of an unknown release"
        raise ImportError(
            f"normscope: compiled with torch {release}, its library does not load into torch "
            f"{torch.__version__}: {error.__cause__ or error}. {_REMEDY}"
        ) from error


def _is_loaded(name: str) -> bool:
    """Return whether a library of this name is loaded, perhaps by an extension written in C++.

    A second copy would end the process: ops can be registered only once.
    """
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _release(version: str) -> str:
    """Return the release part of a version: 2.13.0 for 2.13.0+cpu."""
    release = re.match(r"\d+(\.\d+)*", version)
    return release.group() if release else version


load(Path(__file__).parents[1])
