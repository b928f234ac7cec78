# SPDX-License-Identifier: Apache-2.0
"""Scenes from a folder of the user's own images and masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from scenes import VOID, Scene

# Every so many-th image, in the order of names, is held out.
HELD_OUT_EVERY = 5


class FolderScenes:
    """Images in `folder/images` and masks with the same stem in `folder/masks`.

    A mask has one channel; the value of a pixel is its class, 0 being the background and 255 void.
    The largest class of all masks tells how many classes there are. Images and masks are scaled
    to a square; in training half of them are mirrored.

    Args:
        folder: that holds `images` and `masks`.
        side: height and width of a scene, in pixels.

    Raises:
        ValueError: if a folder or a partner is missing, a file cannot be read as an image, a mask
            has several channels or another size than its image, there are fewer than two images,
            or no mask has a class beside the background.
    """

    def __init__(self, folder: Path, side: int) -> None:
        images, masks = _files_by_stem(folder / "images"), _files_by_stem(folder / "masks")
        for what, of, others in (("a mask", "masks", masks), ("an image", "images", images)):
            for stem in sorted(images.keys() | masks.keys()):
                if stem not in others:
                    lonely = images.get(stem) or masks[stem]
                    raise ValueError(f"{lonely}: expected {what} {folder / of / stem}.*, got none")
        if len(images) < 2:
            raise ValueError(f"{folder}: expected at least 2 images, got {len(images)}")
        scenes = [_load(images[stem], masks[stem], side) for stem in sorted(images)]
        self._held_out = scenes[::HELD_OUT_EVERY]
        self._training = [scene for i, scene in enumerate(scenes) if i % HELD_OUT_EVERY]
        largest = max(int(scene.mask[scene.mask != VOID].max(initial=0)) for scene in scenes)
        if largest < 1:
            raise ValueError(f"{folder / 'masks'}: expected a class beside 0 and {VOID}, got none")
        self.class_names = ("background", *(str(value) for value in range(1, largest + 1)))

    def training_scene(self, rng: np.random.Generator) -> Scene:
        """Draws one of the training images, and mirrors it half of the time."""
        scene = self._training[rng.integers(len(self._training))]
        if rng.integers(2):
            return Scene(scene.image[:, :, ::-1].copy(), scene.mask[:, ::-1].copy())
        return scene

    def held_out_scenes(self) -> list[Scene]:
        """Every fifth image, in the order of names."""
        return self._held_out


def _files_by_stem(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, got none")
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.stem in files:
            raise ValueError(f"{path}: expected one file a stem, got {files[path.stem].name} too")
        files[path.stem] = path
    return files


def _load(image_path: Path, mask_path: Path, side: int) -> Scene:
    image, mask = _open(image_path).convert("RGB"), _open(mask_path)
    channels = len(mask.getbands())
    if channels != 1:
        raise ValueError(f"{mask_path}: expected 1 channel, got {channels} (mode {mask.mode})")
    if mask.size != image.size:
        raise ValueError(
            f"{mask_path}: expected the size of {image_path.name}, {image.width} x {image.height}, "
            f"got {mask.width} x {mask.height}"
        )
    labels = np.asarray(mask.resize((side, side), Image.Resampling.NEAREST)).astype(np.int64)
    if labels.min() < 0 or labels.max() > VOID:
        raise ValueError(
            f"{mask_path}: expected classes 0 to {VOID}, got {labels.min()} to {labels.max()}"
        )
    pixels = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR), np.float32)
    return Scene(np.ascontiguousarray(pixels.transpose(2, 0, 1) / np.float32(255)), labels)


def _open(path: Path) -> Image.Image:
    try:
        image: Image.Image = Image.open(path)
        image.load()
        return image
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path}: expected an image, got {error}") from error
