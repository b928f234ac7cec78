# SPDX-License-Identifier: Apache-2.0
"""Functions of models: give the layers a scope, undo it, and replace them by torch's for tools.

``normscope.models.lightning`` has a plugin for Lightning, and imports it.
"""

from normscope.models.conversion import convert, revert
from normscope.models.deployment import BatchNormThenActivation, to_torch
from normscope.models.flops import fvcore_handles
from normscope.models.registry import register_conversion
from normscope.models.sync import SyncBatchNorm

__all__ = [
    "BatchNormThenActivation",
    "SyncBatchNorm",
    "convert",
    "fvcore_handles",
    "register_conversion",
    "revert",
    "to_torch",
]
