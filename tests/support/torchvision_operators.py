# SPDX-License-Identifier: Apache-2.0
"""Makes torchvision importable if its operators do not load.

Import this module before torchvision, or before anything that imports torchvision.

PyPI only has a CUDA build of torchvision, whose operators do not load with a CPU build of torch.
Its Python part then fails to import because two of them are missing. This module defines these two
without an implementation. Models of torchvision that suppress overlapping boxes do not work then.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_MISSING = ("nms", "qnms")
# The definitions last as long as this object.
_library = torch.library.Library("torchvision", "FRAGMENT")


def _are_loaded() -> bool:
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    try:
        for extension in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(extension)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, _MISSING[0])


if not _are_loaded():
    for name in _MISSING:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
