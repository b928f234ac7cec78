# SPDX-License-Identifier: Apache-2.0
"""Loads the C++ library, on import, into the torch that it was compiled with."""

import re
from pathlib import Path

import torch

# What CMake wrote beside the library: torch's version, such as 2.13.0.
_VERSION_FILE = "torch_version.txt"

_REMEDY = (
    "To compile it for this torch, run in normscope's source directory: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)


def load(directory: Path) -> None:
    """Load the library, if it was compiled with this release of torch.

    torch's C++ interface changes from release to release: another one might load the library and
    call it wrongly. Builds of one release (for CPU, for CUDA) are tried.

    Args:
        directory: Where the library is.

    Raises:
        ImportError: If it was compiled with another release, or this build of torch cannot load it.
    """
    # The file's name ends with its version.
    [library] = directory.glob("libnormscope_torch.so.*")
    file = directory / _VERSION_FILE
    # It may be missing where the package was not installed by CMake.
    compiled_with = file.read_text().strip() if file.exists() else None
    if compiled_with is not None and _release(compiled_with) != _release(torch.__version__):
        raise ImportError(
            f"normscope: expected torch {compiled_with}, which it was compiled with, "
            f"got torch {torch.__version__}. {_REMEDY}"
        )
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        release = compiled_with or "of an unknown release"
        raise ImportError(
            f"normscope: compiled with torch {release}, its library does not load into torch "
            f"{torch.__version__}: {error.__cause__ or error}. {_REMEDY}"
        ) from error


def _release(version: str) -> str:
    """The release of a version: 2.13.0 of 2.13.0+cpu."""
    release = re.match(r"\d+(\.\d+)*", version)
    return release.group() if release else version


load(Path(__file__).parent)
