# SPDX-License-Identifier: Apache-2.0
"""Handles for tools that count the floating-point operations of the training ops."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

__all__ = ["fvcore_handles"]

# Operations per element, as fvcore counts torch's layer in training.
_WITHOUT_WEIGHT = 4
_WITH_WEIGHT = 5


def _batch_norm(inputs: list[Any], outputs: list[Any]) -> Counter[str]:
    has_weight = inputs[1].type().kind() == "TensorType"
    per_element = _WITH_WEIGHT if has_weight else _WITHOUT_WEIGHT
    return Counter(batch_norm=prod(outputs[0].type().sizes()) * per_element)


fvcore_handles = {"normscope::batch_norm_forward": _batch_norm}
"""For fvcore, ``FlopCountAnalysis(model, x).set_op_handle(**fvcore_handles)``.

Layers in training are then counted like torch's. Additions and activations within them count as
nothing, as elsewhere in fvcore. In evaluation the layers run torch's ops and need no handle.
"""
