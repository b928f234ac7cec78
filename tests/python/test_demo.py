# SPDX-License-Identifier: Apache-2.0
"""The parts of the demo."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from check import Comparison, difference, first_steps, tolerance
from folder import FolderScenes
from report import Report, Spread
from scenes import VOID, Batch, DigitScenes, training_batch
from settings import Settings
from train import Training, is_evaluated_after
from trainer import mean_iou

SETTINGS = Settings(ranks=2, images_per_rank=2, steps=10)


@pytest.fixture(scope="module")
def digit_scenes() -> DigitScenes:
    return DigitScenes(48)


def test_splitting_a_batch_over_ranks_does_not_change_its_scenes(digit_scenes: DigitScenes) -> None:
    whole = training_batch(digit_scenes, seed=3, step=7, indices=range(8))

    shares = [Settings(ranks=4).share(rank) for rank in range(4)]
    parts = [training_batch(digit_scenes, 3, 7, share) for share in shares]

    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert torch.equal(whole.masks, torch.cat([part.masks for part in parts]))


@pytest.mark.parametrize(("seed", "step"), [(1, 0), (0, 1)])
def test_seed_and_step_each_change_the_scenes(
    digit_scenes: DigitScenes, seed: int, step: int
) -> None:
    scenes = training_batch(digit_scenes, seed=0, step=0, indices=range(1)).images

    assert not torch.equal(scenes, training_batch(digit_scenes, seed, step, range(1)).images)


def test_held_out_scenes_are_always_the_same_and_show_every_class(
    digit_scenes: DigitScenes,
) -> None:
    held_out = Batch.of(digit_scenes.held_out_scenes())

    assert torch.equal(held_out.images, Batch.of(DigitScenes(48).held_out_scenes()).images)
    assert torch.unique(held_out.masks).tolist() == list(range(len(digit_scenes.class_names)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(6):
        mask = np.full((20, 30), VOID, np.uint8)
        mask[1:, :15], mask[1:, 15:] = i % 4, 0
        Image.new("RGB", (30, 20), (255, 0, 0)).save(tmp_path / "images" / f"{i}.jpg")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{i}.png")
    return tmp_path


def test_a_folder_has_the_classes_of_its_masks_and_holds_every_fifth_image_out(
    folder: Path,
) -> None:
    scenes = FolderScenes(folder, side=16)

    scene, held_out = scenes.training_scene(np.random.default_rng(0)), scenes.held_out_scenes()

    assert scenes.class_names == ("background", "1", "2", "3")
    assert (scene.image.shape, scene.mask.shape) == ((3, 16, 16), (16, 16))
    # Images 0 and 5, whose left halves are 0 % 4 and 5 % 4.
    assert [int(scene.mask[8, 0]) for scene in held_out] == [0, 1]


def test_mirroring_mirrors_the_mask_too(folder: Path) -> None:
    scenes = FolderScenes(folder, side=16)
    masks = [scenes.training_scene(np.random.default_rng(i)).mask for i in range(64)]

    pairs = {(int(mask[8, 0]), int(mask[8, -1])) for mask in masks}

    assert pairs == {(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (3, 0), (0, 3)}


@pytest.mark.parametrize(
    ("removed", "written", "message"),
    [
        (["masks"], {}, "masks: expected a folder, got none"),
        (["masks/2.png"], {}, r"2\.jpg: expected a mask .*masks/2\.\*, got none"),
        (["images/2.jpg"], {}, r"2\.png: expected an image .*images/2\.\*, got none"),
        ([], {"images/2.jpg": None}, r"2\.jpg: expected an image, got cannot identify"),
        ([], {"masks/2.png": ("RGB", 30)}, r"2\.png: expected 1 channel, got 3 \(mode RGB\)"),
        ([], {"masks/2.png": ("L", 10)}, "expected the size of 2.jpg, 30 x 20, got 10 x 20"),
        ([], {"masks/2.png": ("I;16", 30)}, "expected classes 0 to 255, got 300 to 300"),
        ([], {"images/2.png": ("RGB", 30)}, r"2\.png: expected one file a stem, got 2\.jpg too"),
        ([f"{kind}/{i}" for i in range(1, 6) for kind in ("images", "masks")], {}, "2 images, got"),
        ([f"{kind}/{i}" for i in (1, 2, 3, 5) for kind in ("images", "masks")], {}, "a class besi"),
    ],
)
def test_a_malformed_folder_is_refused_by_file_expectation_and_what_was_given(
    folder: Path, removed: list[str], written: dict[str, tuple[str, int] | None], message: str
) -> None:
    for start in removed:
        for path in sorted(folder.rglob("*"), reverse=True):
            if str(path.relative_to(folder)).startswith(start):
                path.rmdir() if path.is_dir() else path.unlink()
    for name, picture in written.items():
        if picture is None:
            (folder / name).write_text("no image")
        else:
            Image.new(picture[0], (picture[1], 20), 300).save(folder / name)

    with pytest.raises(ValueError, match=message):
        FolderScenes(folder, side=16)


def test_mean_iou_of_a_hand_computed_example() -> None:
    masks = torch.tensor([0, 0, 0, 1, 1, VOID])
    predictions = torch.tensor([0, 0, 1, 1, 0, 1])

    # Class 0: 2 of 4; class 1: 1 of 3; class 2 is nowhere.
    assert math.isclose(mean_iou(predictions, masks, class_count=3), (2 / 4 + 1 / 3) / 2)


@pytest.mark.parametrize(
    ("asked", "scope", "images"),
    [
        ("local", "local", 2),
        ("world", "world", 8),
        ("slices", "slices:4", 2),
        ("group:2",) * 2 + (4,),
    ],
)
def test_a_scope_is_known_with_its_norm_batch(asked: str, scope: str, images: int) -> None:
    settings = Settings(ranks=4, images_per_rank=2)

    assert settings.scope(asked) == scope
    assert settings.norm_batch_size(scope) == images


@pytest.mark.parametrize("scope", ["slices:3", "slices:0", "slices:x", "group", "group:3", ""])
def test_a_scope_that_the_demo_cannot_train_is_refused(scope: str) -> None:
    with pytest.raises(ValueError, match=f"^scope: expected .*, got {re.escape(repr(scope))}$"):
        Settings(ranks=4).scope(scope)


@pytest.mark.parametrize("steps", [1, 5, 8, 9, 800])
def test_the_last_evaluation_follows_the_last_step(steps: int) -> None:
    evaluated = [step for step in range(steps) if is_evaluated_after(step, steps)]

    assert evaluated[-1] == steps - 1
    assert len(evaluated) == min(steps, 8)


def test_the_check_sees_another_scope(digit_scenes: DigitScenes) -> None:
    whole = range(SETTINGS.global_batch)

    local = first_steps(digit_scenes, SETTINGS, 0, "local", whole)
    sliced = first_steps(digit_scenes, SETTINGS, 0, "slices:2", whole)

    assert difference(local, local) == 0
    assert difference(local, sliced) > 1000 * tolerance(SETTINGS)
    assert not Comparison("", "", math.nan, tolerance(SETTINGS)).passed


def _report(*mean_ious: float) -> Report:
    held_out = Batch(torch.rand(2, 3, 48, 48), torch.zeros(2, 48, 48, dtype=torch.int64))
    stages = {"local": {0: "local"}, "progressive": {0: "local", 1: "world"}}
    sizes = {"local": ["2"], "progressive": ["2", "4"]}
    trainings = [
        Training(
            scope,
            seed,
            processes=2,
            stages=stages[scope],
            norm_batch_sizes=sizes[scope],
            losses=[2.0, 1.0],
            evaluated_steps=[1, 2],
            mean_ious=[0.1, iou],
            seconds=40.0 + seed,
            predictions=held_out.masks,
        )
        for seed, iou in enumerate(mean_ious)
        for scope in stages
    ]
    return Report(SETTINGS, ("background", "a", "b"), held_out, [], trainings)


def test_the_table_has_spreads_of_several_seeds_and_says_what_was_when() -> None:
    one, two = _report(0.5).table(), _report(0.5, 0.6).table()

    assert "0.500" in one
    assert "±" not in one
    assert "0.550 ± 0.071" in two
    assert "40 ± 1 s" in two
    assert two.splitlines()[-1] == "progressive: local from step 0, world from step 1"


def test_metrics_and_page_tell_of_every_scope(tmp_path: Path) -> None:
    _report(0.5, 0.6).save(tmp_path, "python run.py")

    scopes = json.loads((tmp_path / "metrics.json").read_text())["scopes"]
    page = (tmp_path / "report.html").read_text()
    assert set(scopes) == {"local", "progressive"}
    assert scopes["local"]["mean_iou"] == vars(Spread.of([0.5, 0.6]))
    assert [training["mean_ious"][-1] for training in scopes["local"]["trainings"]] == [0.5, 0.6]
    assert "0.550 ± 0.071 with progressive (2, 4 images)" in page
    assert page.count("<img") == 3
    assert "No scope was recommended." in page
