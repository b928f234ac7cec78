# SPDX-License-Identifier: Apache-2.0
"""The inputs to measure, and the numbers of processes and threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

# From layers of classification and segmentation networks: many positions first, many channels last.
FEATURE_MAPS = (
    (2, 64, 56, 56),
    (8, 64, 56, 56),
    (32, 64, 56, 56),
    (32, 512, 28, 28),
    (8, 2048, 7, 7),
    (2, 256, 129, 129),
    (2, 2048, 33, 33),
)
FEATURE_VECTORS = ((4096, 512), (65536, 64))
# Almost nothing to compute: this measures the cost of a call.
SMALLEST = (2, 8, 1, 1)

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """One rank's input.

    Args:
        shape: [N, C] or [N, C, H, W].
        layout: NC, NCHW or NHWC.
        dtype: torch's name of the dtype; parameters and statistics are float32.
    """

    shape: tuple[int, ...]
    layout: str
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements of the input."""
        return torch.Size(self.shape).numel()

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.layout} {self.dtype}"

    def tensor(self) -> torch.Tensor:
        """Return standard normal numbers in this shape, layout and dtype."""
        values = torch.randn(self.shape).to(getattr(torch, self.dtype))
        if self.layout == "NHWC":
            return values.contiguous(memory_format=torch.channels_last)
        return values


@dataclass(frozen=True)
class Arrangement:
    """The processes and threads that compute.

    Args:
        scope: scope of normscope's layer; torch's layer always normalizes each process alone.
        processes: number of processes, each with its own input.
        threads: number of threads of each process.
    """

    scope: str
    processes: int
    threads: int

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.processes == 1:
            return f"{self.scope}, {threads}"
        return f"{self.scope}, {self.processes} ranks of {threads}"


ARRANGEMENTS = (
    Arrangement("local", processes=1, threads=1),
    Arrangement("local", processes=1, threads=2),
    Arrangement("world", processes=2, threads=1),
    Arrangement("world", processes=4, threads=1),
)


def all_cases() -> list[Case]:
    """Return all inputs."""
    return list(_cases(FEATURE_MAPS, FEATURE_VECTORS))


def few_cases() -> list[Case]:
    """Return a feature map, feature vectors and the smallest input."""
    return list(_cases(FEATURE_MAPS[1:2], FEATURE_VECTORS[:1]))


def _cases(
    maps: tuple[tuple[int, ...], ...], vectors: tuple[tuple[int, ...], ...]
) -> Iterator[Case]:
    for dtype in DTYPES:
        yield from (Case(shape, layout, dtype) for shape in maps for layout in ("NCHW", "NHWC"))
        yield from (Case(shape, "NC", dtype) for shape in vectors)
        yield Case(SMALLEST, "NCHW", dtype)
