# SPDX-License-Identifier: Apache-2.0
"""The kernels without torch's tensors and graph, from the compiled ``kernels.cpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from cases import Case

# The number of a DType in normscope/core/dtype.h.
_DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}

Pass = Callable[[], list[float]]


class _Layer(ctypes.Structure):
    """The struct Layer of ``kernels.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "dy", "y", "dx", "statistics")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "dweight", "dbias")),
        *((name, ctypes.c_int64) for name in ("samples", "channels", "positions")),
        *((name, ctypes.c_int32) for name in ("dtype", "channels_last", "threads")),
    )


class Kernels:
    """Forward and backward of one layer with preallocated outputs, and the fastest copy.

    Args:
        library: The compiled ``kernels.cpp``.
        threads: Number of threads.
    """

    def __init__(self, library: Path, threads: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._threads = threads

    def layer_pass(self, case: Case, x: torch.Tensor, dy: torch.Tensor) -> Pass:
        """Time forward and backward."""
        channels = case.shape[1]
        sums = [torch.zeros(channels) for _ in range(2)]
        tensors = [
            x,
            dy,
            torch.empty_like(x).zero_(),
            torch.empty_like(x).zero_(),
            torch.empty(3 * channels, dtype=torch.float64),
            torch.ones(channels),
            torch.zeros(channels),
            *sums,
        ]
        layer = _Layer(
            *(tensor.data_ptr() for tensor in tensors),
            case.shape[0],
            channels,
            case.elements // (case.shape[0] * channels),
            _DTYPES[case.dtype],
            case.layout != "NCHW",
            self._threads,
        )

        def forward_and_backward() -> list[float]:
            assert tensors  # keeps them alive as long as this function
            start = perf_counter()
            failures = self._library.forward(ctypes.byref(layer))
            middle = perf_counter()
            failures += self._library.backward(ctypes.byref(layer))
            end = perf_counter()
            assert failures == 0
            return [middle - start, end - middle]

        return forward_and_backward

    def copy_pass(self, x: torch.Tensor) -> Pass:
        """Time a copy that bypasses the cache, with the same number of threads."""
        y = x.clone()

        def copy() -> list[float]:
            start = perf_counter()
            self._library.streamed_copy(
                ctypes.c_void_p(x.data_ptr()),
                ctypes.c_void_p(y.data_ptr()),
                ctypes.c_int64(x.nbytes),
                ctypes.c_int32(self._threads),
            )
            return [perf_counter() - start]

        return copy
