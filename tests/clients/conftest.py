# SPDX-License-Identifier: Apache-2.0
"""Imports a library that warns while it is imported, which pytest would make an error of."""

import warnings

import client  # noqa: F401 - see there
import torch

torch.set_num_threads(1)  # more take longer for networks this small

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit.script. is deprecated", DeprecationWarning)
    import torch_geometric  # noqa: F401
