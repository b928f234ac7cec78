# SPDX-License-Identifier: Apache-2.0
"""Batch normalization with a statistics scope that the user chooses.

The names that most programs use are here; the packages have the others.
"""

from normscope import costs as costs
from normscope import functional as functional
from normscope import layers as layers
from normscope import models as models
from normscope import scopes as scopes
from normscope import training as training
from normscope._binding import groups, ops
from normscope.layers import (
    BatchNorm,
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchNormAct,
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
)
from normscope.models import SyncBatchNorm, convert, register_conversion, revert, to_torch
from normscope.scopes import ProgressiveScope, Scope, ScopePlan, recommend_scopes, set_scope
from normscope.training import (
    accumulate,
    checkpoint_context,
    estimate_running_stats,
    fail_fast,
    joined,
    status,
    sync_running_stats,
)

__all__ = [
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAct",
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "ProgressiveScope",
    "Scope",
    "ScopePlan",
    "SyncBatchNorm",
    "accumulate",
    "checkpoint_context",
    "convert",
    "estimate_running_stats",
    "fail_fast",
    "joined",
    "recommend_scopes",
    "register_conversion",
    "revert",
    "set_scope",
    "status",
    "sync_running_stats",
    "to_torch",
]

_ops_in_python = groups.register()
__version__ = ops.version
