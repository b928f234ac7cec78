# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from folder import FolderScenes
from scenes import VOID, DigitScenes, held_out_batch, training_batch


@pytest.fixture(scope="module")
def digit_scenes() -> DigitScenes:
    return DigitScenes(48)


def test_splitting_a_batch_over_ranks_does_not_change_its_scenes(digit_scenes: DigitScenes) -> None:
    whole = training_batch(digit_scenes, seed=3, step=7, indices=range(8))

    parts = [training_batch(digit_scenes, 3, 7, range(i, i + 2)) for i in range(0, 8, 2)]

    assert torch.equal(whole.images, torch.cat([part.images for part in parts]))
    assert torch.equal(whole.masks, torch.cat([part.masks for part in parts]))


def test_seed_and_step_each_change_the_scenes(digit_scenes: DigitScenes) -> None:
    scenes = training_batch(digit_scenes, seed=0, step=0, indices=range(1)).images

    assert not torch.equal(scenes, training_batch(digit_scenes, 1, 0, range(1)).images)
    assert not torch.equal(scenes, training_batch(digit_scenes, 0, 1, range(1)).images)


def test_held_out_scenes_are_always_the_same_and_show_every_class(
    digit_scenes: DigitScenes,
) -> None:
    held_out = held_out_batch(digit_scenes)

    assert torch.equal(held_out.images, held_out_batch(DigitScenes(48)).images)
    assert torch.unique(held_out.masks).tolist() == list(range(len(digit_scenes.class_names)))


def test_a_scene_has_digits_and_background(digit_scenes: DigitScenes) -> None:
    masks = training_batch(digit_scenes, seed=0, step=0, indices=range(32)).masks

    ink = (masks > 0).double().mean(dim=(1, 2))

    assert float(ink.min()) > 0.02
    assert float(ink.max()) < 0.98


def _write_pair(folder: Path, stem: str, mask: np.ndarray) -> None:
    for name in ("images", "masks"):
        (folder / name).mkdir(exist_ok=True)
    Image.new("RGB", (mask.shape[1], mask.shape[0]), (255, 0, 0)).save(
        folder / "images" / f"{stem}.jpg"
    )
    Image.fromarray(mask).save(folder / "masks" / f"{stem}.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(6):
        mask = np.zeros((20, 30), np.uint8)
        mask[:, :15] = i % 4
        mask[0] = VOID
        _write_pair(tmp_path, f"{i}", mask)
    return tmp_path


def test_a_folder_has_the_classes_of_its_masks(folder: Path) -> None:
    scenes = FolderScenes(folder, side=16)

    scene = scenes.training_scene(np.random.default_rng(0))

    assert scenes.class_names == ("background", "1", "2", "3")
    assert scene.image.shape == (3, 16, 16)
    assert scene.mask.shape == (16, 16)


def test_every_fifth_image_of_a_folder_is_held_out(folder: Path) -> None:
    scenes = FolderScenes(folder, side=16)

    classes = [int(scene.mask[8, 0]) for scene in scenes.held_out_scenes()]

    assert classes == [0, 1]  # Images 0 and 5, whose left halves are 0 % 4 and 5 % 4.


def test_mirroring_mirrors_the_mask_too(folder: Path) -> None:
    scenes = FolderScenes(folder, side=16)
    draws = [scenes.training_scene(np.random.default_rng(i)) for i in range(64)]

    left = [int(scene.mask[8, 0]) for scene in draws]
    right = [int(scene.mask[8, -1]) for scene in draws]

    assert set(left) == {0, 1, 2, 3}
    assert set(right) == {0, 1, 2, 3}
    assert all(0 in pair for pair in zip(left, right, strict=True))


def _remove_masks(folder: Path) -> None:
    for path in (folder / "masks").iterdir():
        path.unlink()
    (folder / "masks").rmdir()


def _remove_one_mask(folder: Path) -> None:
    (folder / "masks" / "2.png").unlink()


def _remove_one_image(folder: Path) -> None:
    (folder / "images" / "2.jpg").unlink()


def _write_text_as_image(folder: Path) -> None:
    (folder / "images" / "2.jpg").write_text("no image")


def _write_coloured_mask(folder: Path) -> None:
    Image.new("RGB", (30, 20)).save(folder / "masks" / "2.png")


def _write_small_mask(folder: Path) -> None:
    Image.new("L", (10, 20)).save(folder / "masks" / "2.png")


def _write_large_class(folder: Path) -> None:
    Image.fromarray(np.full((20, 30), 300, np.uint16)).save(folder / "masks" / "2.png")


def _write_two_images_of_a_stem(folder: Path) -> None:
    Image.new("RGB", (30, 20)).save(folder / "images" / "2.png")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_remove_masks, "masks: expected a folder, got none"),
        (_remove_one_mask, r"2\.jpg: expected a mask .*masks/2\.\*, got none"),
        (_remove_one_image, r"2\.png: expected an image .*images/2\.\*, got none"),
        (_write_text_as_image, r"2\.jpg: expected an image, got cannot identify"),
        (_write_coloured_mask, r"2\.png: expected 1 channel, got 3 \(mode RGB\)"),
        (_write_small_mask, r"2\.png: expected the size of 2\.jpg, 30 x 20, got 10 x 20"),
        (_write_large_class, r"2\.png: expected classes 0 to 255, got 300 to 300"),
        (_write_two_images_of_a_stem, r"2\.png: expected one file a stem, got 2\.jpg too"),
    ],
)
def test_a_malformed_folder_is_refused_by_file_expectation_and_what_was_given(
    folder: Path, spoil: object, message: str
) -> None:
    assert callable(spoil)
    spoil(folder)

    with pytest.raises(ValueError, match=message):
        FolderScenes(folder, side=16)


def test_a_folder_of_one_image_is_refused(tmp_path: Path) -> None:
    _write_pair(tmp_path, "only", np.ones((8, 8), np.uint8))

    with pytest.raises(ValueError, match="expected at least 2 images, got 1"):
        FolderScenes(tmp_path, side=16)


def test_masks_of_background_alone_are_refused(tmp_path: Path) -> None:
    for stem in ("a", "b"):
        _write_pair(tmp_path, stem, np.zeros((8, 8), np.uint8))

    with pytest.raises(ValueError, match="masks: expected a class beside 0 and 255, got none"):
        FolderScenes(tmp_path, side=16)
