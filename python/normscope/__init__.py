# SPDX-License-Identifier: Apache-2.0
"""Batch normalization with a statistics scope that the user chooses."""

from typing import TYPE_CHECKING

from normscope import costs, functional
from normscope._binding import groups, ops
from normscope._moved import moved
from normscope.layers.activated import BatchNormAct, BatchNormAct1d, BatchNormAct2d, BatchNormAct3d
from normscope.layers.batch_norm import BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d
from normscope.layers.scope import Scope
from normscope.models.conversion import convert, revert
from normscope.models.deployment import to_torch
from normscope.models.registry import register_conversion
from normscope.models.sync import SyncBatchNorm
from normscope.scopes.plan import ScopePlan
from normscope.scopes.recommendation import recommend_scopes
from normscope.scopes.schedule import ProgressiveScope, set_scope
from normscope.training.accumulation import accumulate
from normscope.training.checkpoint import checkpoint_context
from normscope.training.counters import CommunicationCounters, communication_counters
from normscope.training.faults import fail_fast, status
from normscope.training.graphs import exact_graphs
from normscope.training.non_finite import detect_non_finite
from normscope.training.running_stats import estimate_running_stats, sync_running_stats
from normscope.training.uneven import empty_batch_like, joined

__all__ = [
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAct",
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "CommunicationCounters",
    "ProgressiveScope",
    "Scope",
    "ScopePlan",
    "SyncBatchNorm",
    "accumulate",
    "checkpoint_context",
    "communication_counters",
    "convert",
    "costs",
    "detect_non_finite",
    "empty_batch_like",
    "estimate_running_stats",
    "exact_graphs",
    "fail_fast",
    "functional",
    "joined",
    "recommend_scopes",
    "register_conversion",
    "revert",
    "set_scope",
    "status",
    "sync_running_stats",
    "to_torch",
]

if not TYPE_CHECKING:  # type checkers know the new names only

    def __getattr__(name: str) -> object:
        """Return the object of a name that has moved."""
        return moved(name)


_kernels = groups.register()
__version__ = ops.version()
