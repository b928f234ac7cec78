# SPDX-License-Identifier: Apache-2.0
"""transformers: models with batch normalization, built from a config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from client import Client, NetworkTests, outputs_for
from rank_pool import RankPool
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.utils.data import Dataset
from transformers import (
    BatchEncoding,
    BatchFeature,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import ImageClassifierOutput

import normscope
from normscope.scopes.transformers import ScopeCallback


def resnet() -> nn.Module:
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 2],
        layer_type="basic",
        num_labels=3,
    )
    model: nn.Module = ResNetForImageClassification(config)
    return model


MOBILENET = MobileNetV2Config(
    image_size=32, depth_multiplier=0.35, num_labels=3, classifier_dropout_prob=0.0
)

logits = outputs_for(3, 32, 32, key="logits")

CLIENTS = {
    "resnet": Client(resnet, logits),
    "mobilenet": Client(lambda: MobileNetV2ForImageClassification(MOBILENET), logits),
}


class TestNetworks(NetworkTests):
    """The network tests for all CLIENTS."""


STEPS = 3


class Images(Dataset[dict[str, Tensor]]):
    """Images of one rank, with labels."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.images = rank + torch.randn(2 * STEPS, 3, 32, 32, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[i], "labels": torch.tensor(i % 3)}


def train_with_callback(folder: str) -> list[Tensor]:
    """Train ranks with statistics of their own; return a running mean: at evaluation and saved."""
    rank = distributed.get_rank()
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    )
    model = normscope.convert(resnet(), scope="local")
    name, layer = next(
        (name, m) for name, m in model.named_modules() if isinstance(m, normscope.BatchNorm)
    )
    assert layer.running_mean is not None
    seen = []
    layer.register_forward_pre_hook(
        lambda m, _: None if m.training else seen.append(m.running_mean.clone())
    )
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=0.0,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_broadcast_buffers=False,
    )
    Trainer(
        model,
        arguments,
        train_dataset=Images(rank),
        eval_dataset=Images(rank),
        callbacks=[ScopeCallback()],
    ).train()
    saved = load_file(f"{folder}/checkpoint-2/model.safetensors")[f"{name}.running_mean"]
    return [seen[0], saved, layer.running_mean.clone()]


def test_the_callback_pools_statistics_before_evaluation_and_save(
    ranks: RankPool, tmp_path: Path
) -> None:
    one, other = ranks.run(2, train_with_callback, str(tmp_path))

    assert torch.equal(one[0], other[0])
    assert torch.equal(one[0], one[1])
    assert torch.equal(one[2], other[2])
    assert one[0].abs().max() > 0


@pytest.mark.parametrize("kind", [BatchEncoding, BatchFeature, ImageClassifierOutput])
def test_batches_can_be_without_samples(kind: type[Any]) -> None:
    values = {"logits": torch.ones(4, 3)}
    batch = kind(**values) if kind is ImageClassifierOutput else kind(values)

    empty = normscope.training.empty_batch_like(batch)

    assert type(empty) is kind
    assert empty["logits"].shape == empty.logits.shape == (0, 3)
    assert batch["logits"].shape == batch.logits.shape == (4, 3)
