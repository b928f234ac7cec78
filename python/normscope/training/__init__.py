# SPDX-License-Identifier: Apache-2.0
"""Functions for training loops."""

from normscope.training.accumulation import accumulate
from normscope.training.batches import empty_batch_like
from normscope.training.checkpoint import checkpoint_context
from normscope.training.counters import CommunicationCounters, communication_counters
from normscope.training.faults import fail_fast, status
from normscope.training.modes import detect_non_finite, exact_graphs
from normscope.training.running_stats import estimate_running_stats, sync_running_stats
from normscope.training.uneven import joined

__all__ = [
    "CommunicationCounters",
    "accumulate",
    "checkpoint_context",
    "communication_counters",
    "detect_non_finite",
    "empty_batch_like",
    "estimate_running_stats",
    "exact_graphs",
    "fail_fast",
    "joined",
    "status",
    "sync_running_stats",
]
