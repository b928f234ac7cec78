# SPDX-License-Identifier: Apache-2.0
"""A plugin for Lightning's Trainer that converts models. This module imports Lightning."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import LayerSync

from normscope.layers.scope import Scope
from normscope.models.conversion import convert, revert
from normscope.models.selection import Patterns

__all__ = ["ScopeSync"]


class ScopeSync(LayerSync):
    """A plugin that gives a model's layers a scope while Lightning fits the model.

    Use ``Trainer(plugins=[ScopeSync("world")])`` instead of ``sync_batchnorm=True``, which converts
    to torch.nn.SyncBatchNorm. A strategy with distributed data parallelism calls ``apply`` before
    it wraps the model, and ``revert`` after the fit; a single-process strategy calls neither.

    Args:
        scope: As for :func:`normscope.convert`.
        include: As for :func:`normscope.convert`.
        exclude: As for :func:`normscope.convert`.

    Raises:
        ValueError: If the scope is malformed.

    Example:
        >>> plugin = ScopeSync("slices:4", exclude="1")
        >>> model = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8))
        >>> type(plugin.apply(model)[0]).__module__
        'normscope.layers.batch_norm'
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
