# SPDX-License-Identifier: Apache-2.0
"""A plugin for Lightning gives layers a scope for the duration of a fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from noisy_network import trained
from rank_pool import RankPool
from torch import distributed, nn

import normscope

STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
    ).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return rank + torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=generator)


def task_and_trainer(folder: str, rate: float, **options: Any) -> tuple[Any, Any]:
    """Make a task, which notes the scopes of each step and the statistics in validation."""
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.scopes: list[list[str | None]] = []
            self.validated: list[torch.Tensor] = []

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            scopes = [getattr(self.net[i], "scope", None) for i in (1, 4)]  # type: ignore[index]
            self.scopes.append([scope and str(scope) for scope in scopes])
            loss: torch.Tensor = self.net(x).sub(1).square().sum()
            return loss

        def validation_step(self, x: torch.Tensor) -> None:
            self.validated.append(self.net[1].running_mean.clone())  # type: ignore[index]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=rate)

    os.environ["LOCAL_RANK"] = str(distributed.get_rank())
    return Task(), lightning.Trainer(
        accelerator="cpu",
        devices=2,
        use_distributed_sampler=False,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def loader_of_rank() -> Any:
    batches = [batch(step, distributed.get_rank()) for step in range(STEPS)]
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def fit(folder: str, scope: str, exclude: str | None) -> dict[str, Any]:
    """Fit a model with Lightning; return its scopes during the fit, and classes and state after."""
    from normscope.models.lightning import ScopeSync

    task, trainer = task_and_trainer(
        folder,
        0.01,
        strategy="ddp",
        plugins=[ScopeSync(scope, exclude=exclude)],
        enable_checkpointing=False,
    )
    trainer.fit(task, loader_of_rank())
    return {
        "scopes": task.scopes,
        "classes": {type(task.net[i]).__module__ for i in (1, 4)},
        "state": task.net.state_dict(),
    }


def test_layers_have_the_scope_during_the_fit_which_matches_the_joined_batch(
    ranks: RankPool, tmp_path: Path
) -> None:
    got, other = ranks.run(2, fit, str(tmp_path), "world", None)

    for answer in (got, other):
        assert answer["scopes"] == [["world", "world"]] * STEPS
        assert answer["classes"] == {"torch.nn.modules.batchnorm"}
    assert all(map(torch.equal, got["state"].values(), other["state"].values()))
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.cat([batch(step, rank) for rank in range(2)])
        (net(x).sub(1).square().sum() / 2).backward()  # DistributedDataParallel averages
        optimizer.step()
    for name, value in net.state_dict().items():
        # In float64 (eps 2e-16): three steps of two layers amplify little.
        allowed = 1e-10 * value.abs().amax().item()
        torch.testing.assert_close(got["state"][name], value, rtol=0, atol=allowed, msg=name)


def test_patterns_select_layers_by_name(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(2, fit, str(tmp_path), "local", "net.4")

    assert [answer["scopes"] for answer in answers] == [[["local", None]] * STEPS] * 2


def test_a_malformed_scope_is_refused_at_once() -> None:
    from normscope.models.lightning import ScopeSync

    with pytest.raises(ValueError, match="scope"):
        ScopeSync("slices")


class Named(nn.Module):
    """The network by the name that it has in the LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = trained(normscope.convert(network()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        return y


def fit_with_callback(folder: str, plan: str) -> dict[str, Any]:
    """Fit ranks with statistics of their own; return those of validation and of the file."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from normscope.models.lightning import ScopeSync
    from normscope.scopes.lightning import ScopeCallback

    task, trainer = task_and_trainer(
        folder,
        0.0,
        strategy=DDPStrategy(broadcast_buffers=False),
        plugins=[ScopeSync("local")],
        callbacks=[ScopeCallback(plan), ModelCheckpoint(folder, "step", every_n_train_steps=2)],
        num_sanity_val_steps=0,
    )
    trainer.fit(task, loader_of_rank(), loader_of_rank())
    saved = torch.load(f"{folder}/step.ckpt", weights_only=True)["state_dict"]
    return {
        "scopes": task.scopes[-1],
        "seen": task.validated[0],
        "saved": saved,
        "state": task.net.state_dict(),
    }


def test_the_callback_applies_a_plan_and_pools_before_validation_and_save(
    ranks: RankPool, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    model = Named()
    images = [torch.randn(16, 3, 8, 8, dtype=torch.float64) for _ in range(2)]
    normscope.recommend_scopes(model, images, 0, ranks=2, exclude="net.4").save(plan)

    one, other = ranks.run(2, fit_with_callback, str(tmp_path), str(plan))

    assert one["scopes"] == ["world", "local"]
    assert torch.equal(one["seen"], other["seen"])
    assert all(map(torch.equal, one["state"].values(), other["state"].values()))
    # The file has the statistics of both ranks after two steps, in which the weights are constant.
    means = []
    for rank in range(2):
        alone = network()
        for step in range(2):
            alone(batch(step, rank))
        means.append(alone.get_buffer("1.running_mean"))
    torch.testing.assert_close(one["saved"]["net.1.running_mean"], sum(means) / 2)
