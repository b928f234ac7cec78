# SPDX-License-Identifier: Apache-2.0
"""Lightning trains a converted timm model like the original, in one process and on ranks."""

from __future__ import annotations

import os
from pathlib import Path

import client
import lightning
import pytest
import timm
import torch
from client import RANKS, SAMPLES, samples, seeded
from rank_pool import RankPool
from torch import distributed, nn

import normscope

STEPS = 2

State = dict[str, torch.Tensor]


def network() -> nn.Module:
    return seeded(lambda: timm.create_model("test_efficientnet", num_classes=3))


class Task(lightning.LightningModule):
    def __init__(self, net: nn.Module, ranks: int) -> None:
        super().__init__()
        self.net = net
        self.ranks = ranks

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        # Lightning's DistributedDataParallel averages gradients that should be summed.
        loss: torch.Tensor = self.net(x).square().sum() * self.ranks / SAMPLES
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def fit(net: nn.Module, folder: str, part: slice, ranks: int) -> State:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [samples(3, 32, 32)[part] * step for step in range(1, 1 + STEPS)]
    trainer.fit(Task(net, ranks), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert trainer.world_size == ranks
    return {name: value.clone() for name, value in net.state_dict().items()}


def fit_on_rank(folder: str) -> State:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)
    share = SAMPLES // size
    return fit(normscope.convert(network()), folder, slice(rank * share, (rank + 1) * share), size)


def expected() -> State:
    """Run the same steps without Lightning, with timm's own layers and the whole batch."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(1, 1 + STEPS):
        optimizer.zero_grad()
        loss = net(samples(3, 32, 32) * step).square().sum() / SAMPLES
        loss.backward()
        optimizer.step()
    return net.state_dict()


# In separate processes, because Lightning causes deprecation warnings of torch.
@pytest.mark.parametrize("size", [1, RANKS])
def test_ranks_train_as_torch_on_the_whole_batch(
    ranks: RankPool, tmp_path: Path, size: int
) -> None:
    for state in ranks.run(size, fit_on_rank, str(tmp_path)):
        for name, value in expected().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=client.TOLERANCE, msg=name)
