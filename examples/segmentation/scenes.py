# SPDX-License-Identifier: Apache-2.0
"""Scenes to segment: handwritten digits on photographs, or a folder of the user's own pictures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import skimage
import torch
from PIL import Image
from sklearn.datasets import load_digits

# Side length of a scene in pixels.
SIDE = 48

# Label of pixels that are ignored in training and evaluation (as in Pascal VOC's masks).
VOID = 255

# All of these are included in scikit-image's wheel; nothing is downloaded.
PHOTOGRAPHS = (
    *("astronaut.png", "brick.png", "chelsea.png", "coffee.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)

# Number of digits for training; the rest of the 1 797 digits are held out.
TRAINING_DIGITS = 1400

HELD_OUT_SCENES = 128
HELD_OUT_SEED = 1

# Ink above this share of full black is opaque; half of that already belongs to the digit.
COVERING_INK = 0.5
LABELLED_INK = 0.25

# Random places to try for each digit; with a single one, digits would cover each other.
PLACES = 8

# One in this many images of a folder, sorted by name, is held out.
HELD_OUT_EVERY = 5

Photograph: TypeAlias = npt.NDArray[np.uint8]
Pixels: TypeAlias = npt.NDArray[np.float32]
Labels: TypeAlias = npt.NDArray[np.int64]
Random: TypeAlias = np.random.Generator


class Scene(NamedTuple):
    """An image [3, SIDE, SIDE], and the class of each of its pixels [SIDE, SIDE]."""

    image: Pixels
    mask: Labels


class Batch(NamedTuple):
    """Images [n, 3, SIDE, SIDE] and masks [n, SIDE, SIDE]."""

    images: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def of(cls, scenes: list[Scene]) -> Batch:
        """Joins scenes."""
        # np.stack keeps the memory order of the arrays, which changes the bits of a convolution.
        images, masks = (np.ascontiguousarray(np.stack(part)) for part in zip(*scenes, strict=True))
        return cls(torch.from_numpy(images), torch.from_numpy(masks))


class DigitScenes:
    """Three to five tinted digits, 14 to 23 pixels high, on a photograph under changing light.

    Held-out scenes use digits and parts of photographs that no training scene uses: the right
    quarter of each photograph is reserved for them.

    Example:
        >>> scene = DigitScenes().training_scene(np.random.default_rng(0))
        >>> scene.image.shape, scene.mask.shape
        ((3, 48, 48), (48, 48))
    """

    class_names = ("background", *"0123456789")

    def __init__(self) -> None:
        folder = Path(skimage.__file__).parent / "data"
        photographs = [np.asarray(Image.open(folder / name).convert("RGB")) for name in PHOTOGRAPHS]
        parts = [np.split(image, [3 * image.shape[1] // 4], axis=1) for image in photographs]
        digits = load_digits()
        self._ink = (digits.images / 16.0).astype(np.float32)
        self._values = digits.target
        order = np.random.default_rng(0).permutation(len(self._values))
        self._training = [left for left, _ in parts], order[:TRAINING_DIGITS]
        self._held_out = [right for _, right in parts], order[TRAINING_DIGITS:]

    def training_scene(self, rng: Random) -> Scene:
        """Draws a scene with training digits, which only depends on the generator's state."""
        return self._scene(*self._training, rng)

    def held_out_scenes(self) -> list[Scene]:
        """Draws the scenes with held-out digits, always the same ones."""
        rng = np.random.default_rng(HELD_OUT_SEED)
        return [self._scene(*self._held_out, rng) for _ in range(HELD_OUT_SCENES)]

    def _scene(self, photographs: list[Photograph], digits: Labels, rng: Random) -> Scene:
        photograph = photographs[rng.integers(len(photographs))]
        top, left = (rng.integers(extent - SIDE + 1) for extent in photograph.shape[:2])
        crop = photograph[top : top + SIDE, left : left + SIDE]
        contrast, brightness = rng.uniform(0.4, 1.4), rng.uniform(-0.3, 0.3)
        image = (crop / 255.0 * contrast + brightness).astype(np.float32)
        mask = np.zeros((SIDE, SIDE), np.int64)
        for _ in range(rng.integers(3, 6)):
            self._put_digit(image, mask, digits[rng.integers(len(digits))], rng)
        return Scene(image.transpose(2, 0, 1), mask)

    def _put_digit(self, image: Pixels, mask: Labels, digit: int, rng: Random) -> None:
        """Paints a digit where it hides the least of the others, in a contrasting colour."""
        side = int(rng.integers(14, 24))
        places = [
            (slice(top, top + side), slice(left, left + side))
            for top, left in rng.integers(SIDE - side + 1, size=(PLACES, 2))
        ]
        place = min(places, key=lambda place: np.count_nonzero(mask[place]))
        mean = image[place].mean(axis=(0, 1))
        distance = rng.uniform(0.3, 0.9, 3)
        tint = (mean + np.where(mean < 0.5, distance, -distance)).astype(np.float32)
        ink = np.asarray(
            Image.fromarray(self._ink[digit]).resize((side, side), Image.Resampling.BILINEAR)
        )
        opacity = np.minimum(ink / COVERING_INK, 1)[..., None]
        image[place] = image[place] * (1 - opacity) + opacity * tint
        mask[place][ink > LABELLED_INK] = self._values[digit] + 1


class FolderScenes:
    """Images in `folder/images` and masks with the same stems in `folder/masks`.

    A mask has one channel. The value of a pixel is its class, where 0 is the background and 255 is
    void. The largest class in all masks determines the number of classes. Images and masks are
    scaled to a square; half of the training scenes are mirrored.

    Raises:
        ValueError: if an image or its mask is missing or cannot be read, a mask has several
            channels or another size than its image, there are fewer than two images, or no mask
            has a class besides the background.
    """

    def __init__(self, folder: Path) -> None:
        images, masks = (
            sorted((folder / kind).glob("[!.]*"), key=lambda path: path.stem)
            for kind in ("images", "masks")
        )
        of_image, of_mask = (Counter(path.stem for path in files) for files in (images, masks))
        for stem in sorted(of_image | of_mask):
            if (of_image[stem], of_mask[stem]) != (1, 1):
                raise ValueError(
                    f"{folder}: expected one file {stem}.* in images and one in masks, got "
                    f"{of_image[stem]} and {of_mask[stem]}"
                )
        if len(images) < 2:
            raise ValueError(f"{folder / 'images'}: expected at least 2 images, got {len(images)}")
        scenes = [_load(*files) for files in zip(images, masks, strict=True)]
        largest = max(int(scene.mask[scene.mask != VOID].max(initial=0)) for scene in scenes)
        if largest < 1:
            raise ValueError(f"{folder / 'masks'}: expected a class besides 0 and {VOID}, got none")
        self.class_names = ("background", *map(str, range(1, largest + 1)))
        self._held_out = scenes[::HELD_OUT_EVERY]
        self._training = [scene for i, scene in enumerate(scenes) if i % HELD_OUT_EVERY]

    def training_scene(self, rng: Random) -> Scene:
        """Draws one of the training images, and mirrors it half of the time."""
        image, mask = self._training[rng.integers(len(self._training))]
        return Scene(image[:, :, ::-1], mask[:, ::-1]) if rng.integers(2) else Scene(image, mask)

    def held_out_scenes(self) -> list[Scene]:
        """Returns every fifth image, sorted by name."""
        return self._held_out


def _load(image_path: Path, mask_path: Path) -> Scene:
    try:
        image, mask = Image.open(image_path).convert("RGB"), Image.open(mask_path).copy()
    except OSError as error:
        raise ValueError(f"{image_path}, {mask_path}: expected images, got {error}") from error
    labels = np.asarray(mask)
    if labels.shape != (image.height, image.width) or labels.min() < 0 or labels.max() > VOID:
        raise ValueError(
            f"{mask_path}: expected [{image.height}, {image.width}] as {image_path.name} has, from "
            f"0 to {VOID}, got {list(labels.shape)} from {labels.min()} to {labels.max()}"
        )
    pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float32)
    labels = np.asarray(mask.resize((SIDE, SIDE), Image.Resampling.NEAREST), np.int64)
    return Scene(pixels.transpose(2, 0, 1) / np.float32(255), labels)


SceneSource: TypeAlias = DigitScenes | FolderScenes


def training_batch(source: SceneSource, seed: int, step: int, indices: range) -> Batch:
    """Draws the scenes with the given indices in the global batch of `step`.

    A scene only depends on the seed, the step and its index in the global batch: splitting the
    batch over ranks does not change the data.
    """
    generators = (np.random.default_rng((seed, step, index)) for index in indices)
    return Batch.of([source.training_scene(rng) for rng in generators])
