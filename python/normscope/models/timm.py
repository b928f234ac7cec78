# SPDX-License-Identifier: Apache-2.0
"""The classes that ``convert`` gives timm's layers. Importing this module imports timm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from timm import layers as timm_layers
from torch.fx import Proxy

from normscope._binding import ops
from normscope._binding.torch_private import TorchBatchNorm, has_any_global_hook, has_hooks
from normscope.layers.activated import activation_of
from normscope.layers.batch_norm import BatchNorm2d
from normscope.layers.ending import NOTHING, Activated
from normscope.layers.fx import call_of_module
from normscope.models.registry import register_conversion

if TYPE_CHECKING:
    from normscope.layers.ending import Activation


class BatchNormAct2d(BatchNorm2d, timm_layers.BatchNormAct2d):  # type: ignore[misc]
    """Normalization, then ``drop``, then ``act``; a single op if drop does nothing.

    It derives from timm's class because timm's own functions check for it:
    ``freeze_batch_norm_2d`` would drop the activation of any other class.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # no mask
        """Normalize ``x`` [N, C, H, W], drop, and activate."""
        if isinstance(x, Proxy):
            return call_of_module(self, x)
        if not self.training:
            return self._drop_and_act(TorchBatchNorm.forward(self, x))
        activation = self._activation()
        if activation is None:
            return self._drop_and_act(self._train(x, None, NOTHING))
        return self._train(x, None, Activated(*activation))

    def _drop_and_act(self, y: torch.Tensor) -> torch.Tensor:
        for name in ("drop", "act"):
            module = self._modules.get(name)
            if module is not None:
                y = module(y)
        return y

    def _activation(self) -> tuple[Activation, float] | None:
        """Return the activation that the op can apply; None if drop and act have to be called."""
        if torch.compiler.is_compiling() and not ops.activations_are_in_ops():
            return None
        drop, act = self._modules.get("drop"), self._modules.get("act")
        if act is None or has_any_global_hook():
            return None
        return activation_of(act) if drop is None or _is_identity(drop) else None


class SyncBatchNormAct(BatchNormAct2d, timm_layers.SyncBatchNormAct):  # type: ignore[misc]
    """The same for timm's SyncBatchNormAct, which may lack ``drop`` and ``act``."""


def _is_identity(module: torch.nn.Module) -> bool:
    """Return whether skipping the call of the module has no visible effect."""
    return (
        type(module) is torch.nn.Identity
        and "forward" not in vars(module)
        and not has_hooks(module)
    )


class SplitBatchNorm2d(timm_layers.SplitBatchNorm2d, BatchNorm2d):  # type: ignore[misc]
    """timm's forward, whose ``super().forward`` is normscope's.

    The layers in ``aux_bn`` are converted like any others.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # type: ignore[override] # no mask
        """Normalize the first part of ``input`` [N, C, H, W], and the others with ``aux_bn``."""
        if isinstance(input, Proxy):
            return call_of_module(self, input)
        y: torch.Tensor = super().forward(input)
        return y


register_conversion(timm_layers.BatchNormAct2d, BatchNormAct2d)
register_conversion(timm_layers.SyncBatchNormAct, SyncBatchNormAct)
register_conversion(timm_layers.SplitBatchNorm2d, SplitBatchNorm2d)
