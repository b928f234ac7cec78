# SPDX-License-Identifier: Apache-2.0
"""The demo: its parts, and complete runs."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rank_pool import RankPool
from torch import distributed
from torch.testing import assert_close

from report import write_report
from scenes import SIDE, VOID, Batch, DigitScenes, FolderScenes, training_batch
from settings import Settings
from trainer import LARGEST_LEARNING_RATE, SHOWN_SCENES, Trainer, Training, mean_iou

RUN = Path(__file__).parents[2] / "examples" / "segmentation" / "run.py"

# torchrun takes up to 30 s to end its processes.
END_TIMEOUT_SECONDS = 60

SETTINGS = Settings(ranks=4, images_per_rank=2, steps=5)


@pytest.fixture(scope="module")
def digit_scenes() -> DigitScenes:
    return DigitScenes()


def test_splitting_a_batch_over_ranks_does_not_change_its_scenes(digit_scenes: DigitScenes) -> None:
    whole = training_batch(digit_scenes, seed=3, step=7, indices=range(8))

    shares = [SETTINGS.share(rank) for rank in range(4)]
    parts = [training_batch(digit_scenes, 3, 7, share) for share in shares]

    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert torch.equal(whole.masks, torch.cat([part.masks for part in parts]))


def test_seed_and_step_each_change_the_scenes(digit_scenes: DigitScenes) -> None:
    seeds_and_steps = [(0, 0), (1, 0), (0, 1)]

    images = [training_batch(digit_scenes, *each, range(1)).images for each in seeds_and_steps]

    assert not torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


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


def test_mirroring_mirrors_the_mask_too(folder: Path) -> None:
    masks = training_batch(FolderScenes(folder), seed=0, step=0, indices=range(64)).masks

    pairs = {(int(mask[SIDE // 2, 0]), int(mask[SIDE // 2, -1])) for mask in masks}

    assert pairs == {(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (3, 0), (0, 3)}


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


def test_mean_iou_of_a_hand_computed_example() -> None:
    masks = torch.tensor([0, 0, 0, 1, 1, VOID])
    predictions = torch.tensor([0, 0, 1, 1, 0, 1])

    # Class 0: 2 of 4; class 1: 1 of 3; class 2 does not occur.
    assert math.isclose(mean_iou(predictions, masks), (2 / 4 + 1 / 3) / 2)


def test_scopes_are_listed_with_their_norm_batches() -> None:
    scopes = SETTINGS.scopes(["local", "slices", "group:2", "world"])

    assert scopes == ["local", "slices:4", "group:2", "world"]
    assert list(map(SETTINGS.norm_batch_size, scopes)) == [2, 2, 4, 8]


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


def test_another_scope_gives_other_results() -> None:
    one, other = first_steps("slices:4"), first_steps("slices:2")

    with pytest.raises(AssertionError):
        assert_close(one, other, rtol=1000 * TOLERANCE, atol=1000 * TOLERANCE)


def test_table_metrics_and_page_include_every_scope_and_seed(
    digit_scenes: DigitScenes, tmp_path: Path
) -> None:
    one, two = (
        Training(
            *("progressive", seed, SETTINGS.ranks, None, [1, 2]),
            mean_ious=[0.1, iou],
            stages={0: "local", 1: "world"},
            losses=[2.0, 1.0],
            seconds=40.0,
            predictions=Batch.of(digit_scenes.held_out_scenes()).masks[:SHOWN_SCENES],
        )
        for seed, iou in enumerate([0.5, 0.6])
    )
    report = partial(write_report, tmp_path, "python run.py", SETTINGS, digit_scenes)

    table = report({"progressive": [one]}), report({"progressive": [one, two]})

    assert "0.500" in table[0]
    assert "±" not in table[0]
    assert "0.550 ± 0.071" in table[1]
    assert table[1].splitlines()[-1] == "progressive: local from step 0, world from step 1"
    assert all(len(line) <= 80 for line in table[1].splitlines())
    assert table[0].splitlines()[2].split("  ", 1)[1].split() == (
        ["2,", "8", "0.500", "40", "s", "0", "%", "0", "0", "kB"]
    )
    scope = json.loads((tmp_path / "metrics.json").read_text())["scopes"]["progressive"]
    assert scope["images_per_norm_batch"] == [2, 8]
    assert [training["mean_ious"][-1] for training in scope["trainings"]] == [0.5, 0.6]
    page = (tmp_path / "report.html").read_text()
    assert "0.550 ± 0.071" in page
    assert page.count("<img") == 2
    assert "No scope was recommended." in page


def _command(output: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(RUN), "--output", str(output), *arguments]


def _run(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(output, *arguments), capture_output=True, text=True, check=False)


def _scopes(output: Path) -> dict[str, Any]:
    scopes: dict[str, Any] = json.loads((output / "metrics.json").read_text())["scopes"]
    return scopes


@pytest.mark.slow
def test_training_on_a_folder_is_reproducible(
    folder: Path,
) -> None:
    outputs = folder / "one", folder / "two"

    runs = [
        _run(output, "--data", str(folder), "--ranks", "2", "--steps", "9") for output in outputs
    ]

    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
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
    run = _run(tmp_path, "--thorough", "2", "--seed", "5", "--steps", "6", "--scopes", *scopes)

    assert run.returncode == 0, run.stderr
    results = _scopes(tmp_path)
    assert set(results) == {*scopes, "slices:4"} - {"slices"}
    for result in results.values():
        assert result["seeds"] == [5, 6]
        last = [training["mean_ious"][-1] for training in result["trainings"]]
        assert result["mean_iou"]["mean"] == statistics.fmean(last)
        assert result["mean_iou"]["deviation"] == statistics.stdev(last)
    assert "progressive: local from step 0, group:2 from step 2, world from step 4" in run.stdout
    assert results["world"]["exchanges_per_step"] == 22
    assert results["recommended"]["exchanges_per_step"] < 22
    assert results["recommended"]["trainings"][0]["scopes"]["image_level.1.1"] == "world"
    assert (tmp_path / "report.html").read_text().count("<img") == 3


@pytest.mark.slow
def test_an_error_on_a_rank_ends_the_run_and_is_shown(tmp_path: Path) -> None:
    run = _run(tmp_path, "--images-per-rank", "1", "--scopes", "local", "--steps", "2")

    assert run.returncode == 1
    assert "more than 1 value per channel" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "number"),
    [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_every_rank(
    tmp_path: Path, send: Callable[[int, int], None], number: signal.Signals
) -> None:
    # A shell that runs the tests in the background ignores SIGINT, and children inherit this.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = _command(tmp_path, "--ranks", "2", "--scopes", "local", "--steps", "1000000")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        signal.signal(signal.SIGINT, inherited)
        assert run.stdout is not None
        assert (
            "Training 1 times, 1000000 steps of 4 images each, takes about "
            in run.stdout.readline()
        )

        send(run.pid, number)
        run.communicate(timeout=END_TIMEOUT_SECONDS)

    assert run.returncode == 128 + number
    assert _commands_that_name(tmp_path) == []


def _commands_that_name(folder: Path) -> list[str]:
    """Return the command lines of running processes that contain the folder, as ranks do."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_text().replace("\0", " "))
        except OSError:  # the process has ended
            continue
    return [command for command in commands if str(folder) in command]


def test_a_folder_without_images_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    run = _run(tmp_path / "output", "--data", str(tmp_path))

    assert run.returncode == 2
    assert f"{tmp_path / 'images'}: expected at least 2 images, got 0" in run.stderr
