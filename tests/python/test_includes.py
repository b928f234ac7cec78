# SPDX-License-Identifier: Apache-2.0
"""Folders of C++ sources include only those that ARCHITECTURE.md lets them depend on."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".inc"}
SOURCES = sorted(p for p in (ROOT / "normscope").rglob("*") if p.suffix in SUFFIXES)
INCLUDE = re.compile(r'^#include "normscope/([\w/]+)/\w+\.\w+"', re.MULTILINE)

# What each folder may include besides itself. Those of normscope/torch may include all of these,
# and what stands before them in the list below.
BELOW = {
    "core": set[str](),
    "kernels": {"core"},
    "comm": {"core"},
    "batch_norm": {"core", "kernels", "comm"},
}
FOLDERS_OF_TORCH = [
    "torch",
    "torch/tensors",
    "torch/c10d",
    "torch/groups",
    "torch/calls",
    "torch/portable",
    "torch/ops",
    "torch/nn",
]


def folder_of(path: str) -> str:
    """Return core, kernels, comm, batch_norm, or a folder of torch."""
    first, _, rest = path.partition("/")
    second = rest.partition("/")[0]
    return f"torch/{second}" if first == "torch" and second else first


def allowed(folder: str) -> set[str]:
    if folder in BELOW:
        return BELOW[folder] | {folder}
    return {*BELOW, *FOLDERS_OF_TORCH[: FOLDERS_OF_TORCH.index(folder) + 1]}


def test_every_folder_has_a_place() -> None:
    folders = {folder_of(str(p.parent.relative_to(ROOT / "normscope"))) for p in SOURCES}

    assert folders == {*BELOW, *FOLDERS_OF_TORCH}


def test_a_source_includes_what_its_folder_may_depend_on() -> None:
    wrong = {}
    for source in SOURCES:
        folder = folder_of(str(source.parent.relative_to(ROOT / "normscope")))
        included = {folder_of(path) for path in INCLUDE.findall(source.read_text())}
        if not included <= allowed(folder):
            wrong[str(source)] = included - allowed(folder)

    assert wrong == {}
