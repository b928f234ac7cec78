# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from check import difference, in_one_process, tolerance, trace
from metric import confusion, mean_iou
from network import SegmentationNetwork
from rank import Rank
from scenes import VOID, DigitScenes
from settings import Settings, arrange, default_scopes, norm_batch_size
from train import evaluation_steps

SEGMENTATION = Path(__file__).parents[2] / "examples" / "segmentation"
SETTINGS = Settings(ranks=2, images_per_rank=2, steps=10, seeds=(0,), device="cpu", data=None)


# A rank that says whether its model is still there when its group ends.
RANK_WITH_A_MODEL = """
import weakref
import torch
import torch.distributed as dist
from rank import run_as_rank

models = []

def work(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    models.append(weakref.ref(model))

def end_group():
    print("still there" if models[0]() else "gone")
    end()

end, dist.destroy_process_group = dist.destroy_process_group, end_group
run_as_rank(work)
"""


def test_a_ranks_model_is_gone_before_its_group_is() -> None:
    of_one_rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

    run = subprocess.run(
        [sys.executable, "-c", RANK_WITH_A_MODEL],
        env={**os.environ, **of_one_rank, "PYTHONPATH": str(SEGMENTATION)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.stdout.strip() == "gone", run.stderr


def test_mean_iou_of_a_hand_computed_example() -> None:
    masks = torch.tensor([0, 0, 0, 1, 1, VOID])
    predictions = torch.tensor([0, 0, 1, 1, 0, 1])

    counts = confusion(predictions, masks, class_count=3)

    assert counts.tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 0]]
    # Class 0: 2 of 4; class 1: 1 of 3; class 2 is nowhere. Two roundings of float64.
    assert mean_iou(counts) == pytest.approx((2 / 4 + 1 / 3) / 2, rel=4 * sys.float_info.epsilon)


def test_the_network_keeps_the_size_of_its_images() -> None:
    network = SegmentationNetwork(class_count=11)

    assert network(torch.zeros(2, 3, 48, 40)).shape == (2, 11, 48, 40)


def test_the_network_cannot_train_on_one_image() -> None:
    network = SegmentationNetwork(class_count=11)

    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        network(torch.zeros(1, 3, 48, 48))


@pytest.mark.parametrize(
    ("scope", "processes", "images"),
    [("local", 4, 2), ("world", 4, 8), ("slices", 1, 2), ("slices:2", 1, 4), ("group:2", 4, 4)],
)
def test_a_scope_is_arranged(scope: str, processes: int, images: int) -> None:
    arrangement = arrange(scope, ranks=4, images_per_rank=2)

    assert arrangement.processes == processes
    assert norm_batch_size(arrangement.scope, ranks=4, images_per_rank=2) == images


@pytest.mark.parametrize(
    "scope",
    ["slices:3", "slices:0", "slices:", "slices:x", "group", "group:0", "group:3", "group:8", ""],
)
def test_a_scope_that_cannot_be_arranged_is_refused(scope: str) -> None:
    with pytest.raises(ValueError, match=f"^scope: expected .*, got {re.escape(repr(scope))}$"):
        arrange(scope, ranks=4, images_per_rank=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_default_scopes_fit_any_number_of_ranks(ranks: int) -> None:
    arrangements = [arrange(scope, ranks, images_per_rank=2) for scope in default_scopes(ranks)]

    assert len(set(arrangements)) == len(arrangements)


@pytest.mark.parametrize(
    ("scope", "stand_in"), [("local", "slices:4"), ("group:2", "slices:2"), ("world", "local")]
)
def test_one_process_stands_in_for_the_ranks_of_a_scope(scope: str, stand_in: str) -> None:
    settings = dataclasses.replace(SETTINGS, ranks=4)

    assert in_one_process(scope, settings) == stand_in


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, seeds=(3, 4))

    settings.save(tmp_path / "settings.json")

    assert Settings.load(tmp_path / "settings.json") == settings


def test_shares_of_the_ranks_make_up_the_global_batch() -> None:
    shares = [Rank(number, count=4).share(global_batch=8) for number in range(4)]

    assert [index for share in shares for index in share] == list(range(8))


@pytest.mark.parametrize("steps", [1, 5, 8, 9, 800])
def test_the_last_evaluation_follows_the_last_step(steps: int) -> None:
    due = evaluation_steps(steps)

    assert max(due) == steps
    assert min(due) >= 1


def test_the_check_sees_another_scope() -> None:
    source = DigitScenes(48)
    whole = range(SETTINGS.global_batch)

    local = trace(source, SETTINGS, "local", whole)
    sliced = trace(source, SETTINGS, "slices:2", whole)

    assert difference(local, local) == 0
    assert difference(local, sliced) > 1000 * tolerance(SETTINGS)
