# SPDX-License-Identifier: Apache-2.0
"""The layer that stands in for torch.nn.SyncBatchNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from normscope.conversion import Model, convert
from normscope.modules import BatchNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class SyncBatchNorm(BatchNorm):
    """:class:`BatchNorm` of the scope ``world``, with the arguments of torch.nn.SyncBatchNorm.

    A drop-in for it, on every device that normscope has kernels for.

    Args:
        num_features: C.
        eps: What is added to the variance.
        momentum: Weight of the new statistics in the running ones; None: all have the same.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics.
        process_group: The ranks that share statistics, or a mesh of one dimension; None for the
            default group.
        device: Of the parameters and buffers.
        dtype: Of the parameters and buffers.
        keywords: What else the installed torch's class takes.

    Shape:
        - Input: [N, C, *]
        - Output: that of the input

    Raises:
        ValueError: If this process is not in the group, or for a reason of :class:`BatchNorm`.

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
        **keywords: Any,  # noqa: ANN401 - those of the installed torch
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
        """Call :func:`normscope.convert` with the scope ``world``, in torch's words.

        Unlike torch's, it changes the module in place, and layers get the class that ``convert``
        gives them, which still is one of torch.nn.BatchNorm1d, 2d or 3d.

        Args:
            module: The model, or a layer itself.
            process_group: As :class:`SyncBatchNorm`'s.

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
