# SPDX-License-Identifier: Apache-2.0
"""Scenes to segment: real photographs and textures with real handwritten digits lying on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import skimage
import torch
from PIL import Image
from sklearn.datasets import load_digits

# Label of a pixel that neither trains nor counts (the convention of Pascal VOC's masks).
VOID = 255

# All of these lie inside scikit-image's wheel, so nothing is fetched.
PHOTOGRAPHS = (
    *("astronaut.png", "brick.png", "chelsea.png", "coffee.png", "grass.png", "gravel.png"),
    *("hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
)

# Of 1 797 digits these many train, the others are held out.
TRAINING_DIGITS = 1400

HELD_OUT_SCENES = 128
HELD_OUT_SEED = 1

# Half of full black covers the photograph; half of that belongs to the digit.
COVERING_INK = 0.5
LABELLED_INK = 0.25

# Random places that are tried for a digit; with one, digits bury each other.
PLACES = 8


@dataclass(frozen=True)
class Scene:
    """An image [3, side, side] in float32, and the class of each of its pixels [side, side]."""

    image: npt.NDArray[np.float32]
    mask: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Images [n, 3, side, side] and masks [n, side, side]."""

    images: torch.Tensor
    masks: torch.Tensor

    @classmethod
    def of(cls, scenes: list[Scene]) -> Batch:
        """Joins scenes."""
        images = torch.from_numpy(np.stack([scene.image for scene in scenes]))
        return cls(images, torch.from_numpy(np.stack([scene.mask for scene in scenes])))


class SceneSource(Protocol):
    """Where scenes come from."""

    class_names: tuple[str, ...]  # class 0 is the background

    def training_scene(self, rng: np.random.Generator) -> Scene:
        """Draws one scene; a function of the generator's state alone."""

    def held_out_scenes(self) -> list[Scene]:
        """Makes the scenes that every scope and every seed is judged by."""


class DigitScenes:
    """Three to five tinted digits, 14 to 23 pixels high, on a photograph under changing light.

    Held-out scenes are made of digits and of parts of the photographs that no training scene
    shows: the right quarter of each photograph is kept for them.

    Args:
        side: height and width of a scene, in pixels.

    Example:
        >>> scene = DigitScenes(48).training_scene(np.random.default_rng(0))
        >>> scene.image.shape, scene.mask.shape
        ((3, 48, 48), (48, 48))
    """

    class_names = ("background", *(str(digit) for digit in range(10)))

    def __init__(self, side: int) -> None:
        self._side = side
        photographs = [_photograph(name) for name in PHOTOGRAPHS]
        borders = [3 * photograph.shape[1] // 4 for photograph in photographs]
        parts = list(zip(photographs, borders, strict=True))
        digits = load_digits()
        self._ink = (digits.images / 16.0).astype(np.float32)
        self._values = digits.target
        order = np.random.default_rng(0).permutation(len(self._values))
        self._training = [image[:, :x] for image, x in parts], order[:TRAINING_DIGITS]
        self._held_out = [image[:, x:] for image, x in parts], order[TRAINING_DIGITS:]

    def training_scene(self, rng: np.random.Generator) -> Scene:
        """Draws a scene of training digits."""
        return self._scene(*self._training, rng)

    def held_out_scenes(self) -> list[Scene]:
        """Draws scenes of held-out digits, always the same."""
        rng = np.random.default_rng(HELD_OUT_SEED)
        return [self._scene(*self._held_out, rng) for _ in range(HELD_OUT_SCENES)]

    def _scene(
        self,
        photographs: list[npt.NDArray[np.uint8]],
        digits: npt.NDArray[np.int64],
        rng: np.random.Generator,
    ) -> Scene:
        photograph = photographs[rng.integers(len(photographs))]
        top, left = (rng.integers(extent - self._side + 1) for extent in photograph.shape[:2])
        crop = photograph[top : top + self._side, left : left + self._side]
        contrast, brightness = rng.uniform(0.4, 1.4), rng.uniform(-0.3, 0.3)
        image = (crop / 255.0 * contrast + brightness).astype(np.float32)
        mask = np.zeros((self._side, self._side), np.int64)
        for _ in range(rng.integers(3, 6)):
            self._put_digit(image, mask, digits[rng.integers(len(digits))], rng)
        return Scene(np.ascontiguousarray(image.transpose(2, 0, 1)), mask)

    def _put_digit(
        self,
        image: npt.NDArray[np.float32],
        mask: npt.NDArray[np.int64],
        digit: int,
        rng: np.random.Generator,
    ) -> None:
        side = int(rng.integers(14, 24))
        top, left = _least_covered_place(mask, side, rng)
        place = slice(top, top + side), slice(left, left + side)
        ink = np.asarray(
            Image.fromarray(self._ink[digit]).resize((side, side), Image.Resampling.BILINEAR)
        )
        opacity = np.minimum(ink / COVERING_INK, 1)[..., None]
        image[place] = image[place] * (1 - opacity) + opacity * _tint(image[place], rng)
        mask[place][ink > LABELLED_INK] = self._values[digit] + 1


def _tint(covered: npt.NDArray[np.float32], rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Draws a colour that differs in each channel from what it covers: brighter on dark."""
    mean = covered.mean(axis=(0, 1))
    distance = rng.uniform(0.3, 0.9, 3)
    tint: npt.NDArray[np.float32] = mean + np.where(mean < 0.5, distance, -distance)
    return tint.astype(np.float32)


def _least_covered_place(
    mask: npt.NDArray[np.int64], side: int, rng: np.random.Generator
) -> tuple[int, int]:
    """Draws some places for a square and returns the one (top, left) that hides least."""
    places = rng.integers(len(mask) - side + 1, size=(PLACES, 2)).tolist()
    covered = [np.count_nonzero(mask[y : y + side, x : x + side]) for y, x in places]
    top, left = places[int(np.argmin(covered))]
    return top, left


def _photograph(name: str) -> npt.NDArray[np.uint8]:
    """Loads a photograph that scikit-image ships, [height, width, 3]."""
    with Image.open(Path(skimage.__file__).parent / "data" / name) as image:
        return np.asarray(image.convert("RGB"))


def training_batch(source: SceneSource, seed: int, step: int, indices: range) -> Batch:
    """Draws the scenes of the global batch of `step` that `indices` names.

    A scene depends on (seed, step, its index in the global batch) alone, so that splitting the
    batch over ranks does not change the data.
    """
    generators = (np.random.default_rng((seed, step, index)) for index in indices)
    return Batch.of([source.training_scene(rng) for rng in generators])
