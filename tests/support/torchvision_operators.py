# SPDX-License-Identifier: Apache-2.0
"""Let torchvision be imported although its operators do not load.

Import it before torchvision, or before what imports torchvision.

PyPI has torchvision built for CUDA alone, whose operators do not load beside a CPU build of torch.
Its Python part then stops at two of them. These get their names here, without anything to run: of
torchvision's models, those that suppress overlapping boxes cannot do so.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_MISSING = ("nms", "qnms")
_library = torch.library.Library("torchvision", "FRAGMENT")  # its definitions end with it


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
