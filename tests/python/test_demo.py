# SPDX-License-Identifier: Apache-2.0
"""The demo: its parts, and complete runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rank_pool import RankPool
from torch import distributed
from torch.testing import assert_close

import run
from scenes import SIDE, VOID, Batch, DigitScenes, FolderScenes, training_batch
from settings import Settings
from trainer import LARGEST_LEARNING_RATE, Trainer

SETTINGS = Settings(ranks=4, images_per_rank=2, steps=2)


@pytest.fixture(scope="module")
def digit_scenes() -> DigitScenes:
    return DigitScenes()


def test_splitting_a_batch_over_ranks_does_not_change_its_scenes(digit_scenes: DigitScenes) -> None:
    whole = training_batch(digit_scenes, seed=3, step=7, indices=range(8))

    shares = [SETTINGS.share(rank) for rank in range(4)]
    parts = [training_batch(digit_scenes, 3, 7, share) for share in shares]

    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert torch.equal(whole.masks, torch.cat([part.masks for part in parts]))


def test_held_out_scenes_are_always_the_same_and_show_every_class(
    digit_scenes: DigitScenes,
) -> None:
    images, masks = Batch.of(digit_scenes.held_out_scenes())

    assert torch.equal(images, Batch.of(DigitScenes().held_out_scenes()).images)
    assert torch.unique(masks).tolist() == list(range(len(digit_scenes.class_names)))


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


def test_a_folder_has_the_classes_of_its_masks_and_holds_out_every_fifth_image(
    folder: Path,
) -> None:
    source = FolderScenes(folder)

    scenes = training_batch(source, seed=0, step=0, indices=range(2))

    assert source.class_names == ("background", "1", "2", "3")
    assert scenes.images.shape == (2, 3, SIDE, SIDE)
    assert scenes.masks.shape == (2, SIDE, SIDE)
    # Images 0 and 5, with left halves of class 0 % 4 and 5 % 4.
    assert [scene.mask[SIDE // 2, 0] for scene in source.held_out_scenes()] == [0, 1]


@pytest.mark.parametrize(
    ("removed", "written", "message"),
    [
        (["masks"], {}, r": expected one file 0\.\* in images and one in masks, got 1 and 0"),
        (["masks/2.png"], {}, r"one file 2\.\* in images and one in masks, got 1 and 0"),
        (["images/2.jpg"], {}, r"one file 2\.\* in images and one in masks, got 0 and 1"),
        ([], {"images/2.png": ("RGB", 30)}, r"2\.\* in images and one in masks, got 2 and 1"),
        ([], {"images/2.jpg": None}, r"images/2\.jpg.*: expected images, got cannot identify"),
        ([], {"masks/2.png": None}, r"masks/2\.png: expected images, got cannot identify"),
        ([], {"masks/2.png": ("RGB", 30)}, r"2\.png: expected \[20, 30\] .* got \[20, 30, 3\]"),
        ([], {"masks/2.png": ("L", 10)}, r"expected \[20, 30\] as 2\.jpg has, .* got \[20, 10\]"),
        ([], {"masks/2.png": ("I;16", 30)}, "from 0 to 255, .* from 300 to 300"),
        ([f"{kind}/{i}" for i in range(1, 6) for kind in ("images", "masks")], {}, "2 images, got"),
        ([f"{kind}/{i}" for i in (1, 2, 3, 5) for kind in ("images", "masks")], {}, "a class besi"),
    ],
)
def test_a_malformed_folder_is_refused(
    folder: Path, removed: list[str], written: dict[str, tuple[str, int] | None], message: str
) -> None:
    for start in removed:
        for path in folder.glob(f"{start}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, picture in written.items():
        if picture is None:
            (folder / name).write_text("no image")
        else:
            Image.new(picture[0], (picture[1], 20), 300).save(folder / name)

    with pytest.raises(ValueError, match=message):
        FolderScenes(folder)


@pytest.mark.parametrize("scope", ["slices:3", "slices:x", "group", "group:3", "group:0", ""])
def test_a_scope_that_the_demo_cannot_train_is_refused(scope: str) -> None:
    with pytest.raises(ValueError, match=f"^--scopes: expected .*, got {re.escape(repr(scope))}$"):
        SETTINGS.scopes([scope])


class Float64Trainer(Trainer):
    """AdamW divides a gradient by its magnitude: rounding in float32 could reverse a step."""

    def batch(self, step: int) -> Batch:
        images, masks = super().batch(step)
        return Batch(images.double(), masks)


def first_steps(scope: str) -> dict[str, torch.Tensor]:
    """Return losses, parameters and statistics, of a rank or one process with the global batch."""
    alone = not distributed.is_initialized()
    share = range(SETTINGS.global_batch) if alone else SETTINGS.share(distributed.get_rank())
    torch.set_default_dtype(torch.float64)
    try:
        trainer = Float64Trainer(SETTINGS.source(), SETTINGS, 0, scope, share)
        losses = torch.stack([trainer.step(step) for step in range(SETTINGS.steps)])
    finally:
        torch.set_default_dtype(torch.float32)
    if not alone:
        distributed.all_reduce(losses)
        losses /= SETTINGS.ranks
    return {**trainer.network.state_dict(), "losses": losses}


# A gradient is a sum over n pixels. A different order of summation changes it by about
# sqrt(n) * eps, and gradients are below 1 here. In each step, AdamW turns an error e of a gradient
# near zero into an error learning_rate / adam_eps * e of the parameter.
ADAM_EPS = 1e-8
PIXELS = SETTINGS.global_batch * SIDE**2
ROUNDING = math.sqrt(PIXELS) * torch.finfo(torch.float64).eps
TOLERANCE = SETTINGS.steps * LARGEST_LEARNING_RATE / ADAM_EPS * ROUNDING


@pytest.mark.parametrize(
    ("scope", "slices"), [("local", "slices:4"), ("group:2", "slices:2"), ("world", "slices:1")]
)
def test_training_depends_on_the_scope_and_not_on_the_number_of_processes(
    ranks: RankPool, scope: str, slices: str
) -> None:
    together = ranks.run(SETTINGS.ranks, first_steps, scope)[0]

    alone = first_steps(slices)

    assert_close(together, alone, rtol=TOLERANCE, atol=TOLERANCE)


def _run(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, run.__file__, "--output", str(output), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _scopes(output: Path) -> dict[str, Any]:
    scopes: dict[str, Any] = json.loads((output / "metrics.json").read_text())["scopes"]
    return scopes


@pytest.mark.slow
def test_training_on_a_folder_is_reproducible(folder: Path) -> None:
    outputs = folder / "one", folder / "two"

    runs = [
        _run(output, "--data", str(folder), "--ranks", "2", "--steps", "9") for output in outputs
    ]

    assert [each.returncode for each in runs] == [0, 0], runs[0].stderr
    one, two = map(_scopes, outputs)
    assert set(one) == {"local", "world", "recommended"}
    for scope in one:
        (first,), (second,) = one[scope]["trainings"], two[scope]["trainings"]
        assert len(first["losses"]) == 9
        assert first["losses"] == second["losses"]
        assert first["mean_ious"] == second["mean_ious"]
        # There are eight evaluations, the last one after the last step.
        assert first["evaluated_steps"] == [2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.slow
def test_a_thorough_run_reports_mean_and_spread_of_every_scope(tmp_path: Path) -> None:
    scopes = ("local", "slices", "group:2", "world", "progressive", "recommended")
    done = _run(tmp_path, "--thorough", "2", "--seed", "5", "--steps", "6", "--scopes", *scopes)

    assert done.returncode == 0, done.stderr
    results = _scopes(tmp_path)
    assert set(results) == {*scopes, "slices:4"} - {"slices"}
    for result in results.values():
        assert result["seeds"] == [5, 6]
        last = [training["mean_ious"][-1] for training in result["trainings"]]
        assert result["mean_iou"]["mean"] == statistics.fmean(last)
        assert result["mean_iou"]["deviation"] == statistics.stdev(last)
    assert "progressive: local from step 0, group:2 from step 2, world from step 4" in done.stdout
    assert results["world"]["exchanges_per_step"] == 22
    # Six steps are not enough for a plan with other scopes.
    assert results["recommended"]["exchanges_per_step"] == 22
    assert set(results["recommended"]["trainings"][0]["scopes"].values()) == {"world"}
    assert (tmp_path / "report.html").read_text().count('<img alt="') == 3


def test_a_folder_without_images_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--data", str(tmp_path)])

    with pytest.raises(SystemExit, match=r"^2$"):
        run.main()

    error = capsys.readouterr().err
    assert f"{tmp_path / 'images'}: expected at least 2 images, got 0" in error
