# SPDX-License-Identifier: Apache-2.0
"""What Lightning's Trainer needs to convert models by itself; this module alone imports it."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import LayerSync

from normscope._layers import Patterns
from normscope.conversion import convert, revert
from normscope.scope import Scope


class ScopeSync(LayerSync):
    """A plugin by which Lightning gives a model's layers a scope while it fits.

    For ``Trainer(plugins=[ScopeSync("world")])``, in place of ``sync_batchnorm=True``, which gives
    them torch.nn.SyncBatchNorm. A strategy with distributed data parallelism calls ``apply`` before
    it wraps the model, and ``revert`` after the fit; a strategy of one process calls neither.

    Args:
        scope: As :func:`normscope.convert`'s.
        include: As :func:`normscope.convert`'s.
        exclude: As :func:`normscope.convert`'s.

    Raises:
        ValueError: If the scope is malformed.

    Example:
        >>> plugin = ScopeSync("slices:4", exclude="1")
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8))
        >>> type(plugin.apply(model)[0]).__module__
        'normscope.modules'
        >>> type(plugin.revert(model)[0]).__module__
        'torch.nn.modules.batchnorm'
    """

    def __init__(
        self,
        scope: Scope | str = "world",
        include: Patterns | None = None,
        exclude: Patterns | None = None,
    ) -> None:
        self.scope = Scope(str(scope))
        self.include = include
        self.exclude = exclude

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Call :func:`normscope.convert`.

        Args:
            model: The LightningModule.

        Raises:
            TypeError: As ``convert`` does.
            ValueError: As ``convert`` does.
        """
        return convert(model, self.scope, self.include, self.exclude)

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Call :func:`normscope.revert`.

        Args:
            model: The LightningModule.

        Raises:
            TypeError: As ``revert`` does.
        """
        return revert(model)
