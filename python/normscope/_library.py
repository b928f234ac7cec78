# SPDX-License-Identifier: Apache-2.0
"""The C++ library: its ops, typed."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

# The file's name ends with its version.
[_path] = Path(__file__).parent.glob("libnormscope_torch.so.*")
torch.ops.load_library(str(_path))
_ops = torch.ops.normscope

batch_norm = cast("Callable[..., torch.Tensor]", _ops.batch_norm.default)
batch_norm_apply = cast("Callable[..., torch.Tensor]", _ops.batch_norm_apply.default)
batch_norm_forward = _ops.batch_norm_forward.default
canonical_scope = cast("Callable[[str], str]", _ops.canonical_scope.default)
resolve_scope = cast("Callable[[str, str, int], str]", _ops.resolve_scope.default)
available_kernels = cast("Callable[[], list[str]]", _ops.available_kernels.default)
default_kernels = cast("Callable[[], str]", _ops.default_kernels.default)
cuda = cast("Callable[[], str]", _ops.cuda.default)
transport = cast("Callable[[str], str]", _ops.transport.default)
forget_destroyed_groups = cast("Callable[[], None]", _ops.forget_destroyed_groups.default)
forget_groups = cast("Callable[[], None]", _ops.forget_groups.default)
communication_counters = cast(
    "Callable[[], tuple[int, int, float]]", _ops.communication_counters.default
)
version = cast("Callable[[], str]", _ops.version.default)
