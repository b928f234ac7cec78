# SPDX-License-Identifier: Apache-2.0
"""The classes that ``convert`` gives torch's lazy layers: the first input determines C."""

from __future__ import annotations

import torch

from normscope._binding.torch_private import LazyTorchBatchNorm
from normscope.layers.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d


class _TakesMask(LazyTorchBatchNorm):
    """A lazy layer whose first input may have a mask."""

    def initialize_parameters(self, input: torch.Tensor, *, mask: object = None) -> None:
        """Take the number of channels from ``input`` [N, C, *]."""
        super().initialize_parameters(input)


class LazyBatchNorm1d(_TakesMask, torch.nn.LazyBatchNorm1d, BatchNorm1d):
    """A torch.nn.LazyBatchNorm1d that becomes a :class:`normscope.BatchNorm1d`."""

    cls_to_become = BatchNorm1d


class LazyBatchNorm2d(_TakesMask, torch.nn.LazyBatchNorm2d, BatchNorm2d):
    """A torch.nn.LazyBatchNorm2d that becomes a :class:`normscope.BatchNorm2d`."""

    cls_to_become = BatchNorm2d


class LazyBatchNorm3d(_TakesMask, torch.nn.LazyBatchNorm3d, BatchNorm3d):
    """A torch.nn.LazyBatchNorm3d that becomes a :class:`normscope.BatchNorm3d`."""

    cls_to_become = BatchNorm3d
