# SPDX-License-Identifier: Apache-2.0
"""A callback for Lightning's Trainer. Only this module and models.lightning import Lightning."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from normscope.scopes.plan import ScopePlan, plan_of
from normscope.training.running_stats import sync_running_stats

__all__ = ["ScopeCallback"]


class ScopeCallback(Callback):
    """A callback that applies a plan and pools the running statistics of the ranks.

    With a scope narrower than ``world`` each rank has its own running statistics. The callback
    calls :func:`normscope.sync_running_stats` before each validation and at the end of each epoch
    and of the fit, and for each checkpoint that is not of weights alone. Its layers come from
    ``ScopeSync`` or from ``convert`` in ``configure_model``.

    Args:
        plan: Applied when the training starts: a plan or the path of a saved one; None for none.

    Raises:
        ValueError: If the path has no plan.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ScopeCallback()], logger=False, accelerator="cpu")
    """

    def __init__(self, plan: ScopePlan | str | os.PathLike[str] | None = None) -> None:
        self.plan = None if plan is None else plan_of(plan)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the plan."""
        if self.plan is not None:
            self.plan.apply(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pool the running statistics."""
        sync_running_stats(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pool the running statistics."""
        sync_running_stats(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pool the running statistics."""
        sync_running_stats(pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Pool the running statistics, which the checkpoint shares with the model."""
        sync_running_stats(pl_module)
