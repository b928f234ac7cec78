# SPDX-License-Identifier: Apache-2.0
"""A callback for the Trainer of transformers. Only this module imports transformers."""

from __future__ import annotations

import os

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from normscope.scopes.plan import ScopePlan, plan_of
from normscope.training.running_stats import sync_running_stats

__all__ = ["ScopeCallback"]


class ScopeCallback(TrainerCallback):  # type: ignore[misc] # has no types
    """A callback that applies a plan and pools the running statistics of the ranks.

    With a scope narrower than ``world`` each rank has its own running statistics. The callback
    calls :func:`normscope.sync_running_stats` before the Trainer evaluates or saves during the
    training, and at its end. ``convert`` has made the layers before the model is given to the
    Trainer. Set ``ddp_broadcast_buffers=False`` in the TrainingArguments: otherwise
    DistributedDataParallel replaces the statistics of all ranks by those of rank 0.

    Args:
        plan: Applied when the training starts: a plan or the path of a saved one; None for none.

    Raises:
        ValueError: If the path has no plan.
    """

    def __init__(self, plan: ScopePlan | str | os.PathLike[str] | None = None) -> None:
        self.plan = None if plan is None else plan_of(plan)

    # The Trainer passes its arguments, its state and its control, and further things by name.

    def on_train_begin(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        """Apply the plan."""
        if self.plan is not None:
            self.plan.apply(model)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        **__: object,
    ) -> None:
        """Pool the running statistics if the Trainer evaluates or saves now."""
        if control.should_evaluate or control.should_save:
            sync_running_stats(model)

    # The Trainer asks its callbacks at both places; the callback that decides comes first.
    on_epoch_end = on_step_end

    def on_train_end(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        """Pool the running statistics."""
        sync_running_stats(model)
