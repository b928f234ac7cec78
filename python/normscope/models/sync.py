# SPDX-License-Identifier: Apache-2.0
"""A drop-in replacement for torch.nn.SyncBatchNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normscope.layers.batch_norm import BatchNorm
from normscope.models.conversion import Model, convert
from normscope.models.registry import register_conversion

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class SyncBatchNorm(BatchNorm, torch.nn.SyncBatchNorm):
    """:class:`BatchNorm` with scope ``world``, with the arguments of torch.nn.SyncBatchNorm.

    A drop-in replacement for it, on every device. ``convert`` makes it of a torch.nn.SyncBatchNorm.
    Tools that look for torch's class find it. DistributedDataParallel, which refuses torch's class
    on CPUs, takes it.

    Args:
        num_features: C.
        eps: Added to the variance.
        momentum: Weight of the new statistics in the running ones; None for a cumulative average.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics.
        process_group: The ranks that share statistics, or a mesh of one dimension; None for the
            default group.
        device: Device of the parameters and buffers.
        dtype: Dtype of the parameters and buffers.
        keywords: Further arguments of the class in the installed torch.

    Shape:
        - Input: [N, C, *]
        - Output: same as the input

    Raises:
        ValueError: If this process is not in the group; further as :class:`BatchNorm` raises it.

    Example:
        >>> layer = SyncBatchNorm(3)
        >>> layer.scope
        Scope(text='world')
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        track_running_stats: bool = True,  # noqa: FBT001, FBT002
        process_group: ProcessGroup | DeviceMesh | None = None,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
        **keywords: Any,  # noqa: ANN401 - depends on the installed torch
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            device,
            dtype,
            process_group=process_group,
            **keywords,
        )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: Model, process_group: ProcessGroup | DeviceMesh | None = None
    ) -> Model:
        """Call :func:`normscope.convert` with scope ``world``; has the signature of torch's method.

        Unlike torch's method, it changes the module in place. Layers get the class that ``convert``
        gives them.

        Args:
            module: The model, or a single layer.
            process_group: As for :class:`SyncBatchNorm`.

        Returns:
            The module.

        Raises:
            TypeError: As ``convert`` does.
            ValueError: If this process is not in the group.

        Example:
            >>> SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm2d(3)).scope
            Scope(text='world')
        """
        return convert(module, "world", process_group=process_group)


register_conversion(torch.nn.SyncBatchNorm, SyncBatchNorm)
