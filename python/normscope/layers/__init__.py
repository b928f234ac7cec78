# SPDX-License-Identifier: Apache-2.0
"""Layers that take the place of torch's, and the scope that each of them has."""

from normscope.layers.activated import BatchNormAct, BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from normscope.layers.batch_norm import (
    BatchNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    SliceStats,
)
from normscope.layers.ending import Activation
from normscope.layers.lazy import LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d
from normscope.layers.scope import Scope

__all__ = [
    "Activation",
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAct",
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "Scope",
    "SliceStats",
]
