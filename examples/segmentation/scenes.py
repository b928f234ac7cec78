# SPDX-License-Identifier: Apache-2.0
"""Scenes to segment: real photographs and textures with real handwritten digits lying on them."""

from __future__ import annotations

import enum
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
    "astronaut.png",
    "brick.png",
    "chelsea.png",
    "coffee.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)

# Of 1 797 digits these many train, the others are held out.
TRAINING_DIGITS = 1400

# Seed 0 drew other scenes of the same digits, on which learning rate and steps were chosen.
HELD_OUT_SCENES = 128
HELD_OUT_SEED = 1

# Ink above this share of full black belongs to the digit; below it the photograph shows through.
INK_THRESHOLD = 0.4

# Random places that are tried for a digit; with one, digits bury each other.
PLACES = 8


class Split(enum.Enum):
    """The part of the digits and photographs that a scene is made of."""

    TRAINING = 0
    HELD_OUT = 1


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


class SceneSource(Protocol):
    """Where scenes come from."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of each class; class 0 is the background."""

    def training_scene(self, rng: np.random.Generator) -> Scene:
        """Draws one scene; a function of the generator's state alone."""

    def held_out_scenes(self) -> list[Scene]:
        """Makes the scenes that every scope and every seed is judged by."""


class DigitScenes:
    """Three to five tinted digits, 18 to 30 pixels high, on a photograph under changing light.

    Held-out scenes are made of digits and of parts of the photographs that no training scene
    shows: the right quarter of each photograph is kept for them.

    Args:
        side: height and width of a scene, in pixels.

    Example:
        >>> scene = DigitScenes(48).training_scene(np.random.default_rng(0))
        >>> scene.image.shape, scene.mask.shape
        ((3, 48, 48), (48, 48))
    """

    def __init__(self, side: int) -> None:
        self._side = side
        self._photographs = [_photograph(name) for name in PHOTOGRAPHS]
        digits = load_digits()
        self._ink = (digits.images / 16.0).astype(np.float32)
        self._values = digits.target
        order = np.random.default_rng(0).permutation(len(self._values))
        self._indices = {
            Split.TRAINING: order[:TRAINING_DIGITS],
            Split.HELD_OUT: order[TRAINING_DIGITS:],
        }

    @property
    def class_names(self) -> tuple[str, ...]:
        """Background, then the ten digits."""
        return ("background", *(str(digit) for digit in range(10)))

    def training_scene(self, rng: np.random.Generator) -> Scene:
        """Draws a scene of training digits."""
        return self._scene(Split.TRAINING, rng)

    def held_out_scenes(self) -> list[Scene]:
        """Draws scenes of held-out digits, always the same."""
        rng = np.random.default_rng(HELD_OUT_SEED)
        return [self._scene(Split.HELD_OUT, rng) for _ in range(HELD_OUT_SCENES)]

    def _scene(self, split: Split, rng: np.random.Generator) -> Scene:
        image = self._background(split, rng)
        mask = np.zeros((self._side, self._side), np.int64)
        for _ in range(rng.integers(3, 6)):
            self._put_digit(image, mask, self._indices[split], rng)
        return Scene(np.ascontiguousarray(image.transpose(2, 0, 1)), mask)

    def _background(self, split: Split, rng: np.random.Generator) -> npt.NDArray[np.float32]:
        photograph = self._photographs[rng.integers(len(self._photographs))]
        height, width, _ = photograph.shape
        border = 3 * width // 4
        first, last = (0, border) if split is Split.TRAINING else (border, width)
        top = rng.integers(height - self._side + 1)
        left = rng.integers(first, last - self._side + 1)
        crop = photograph[top : top + self._side, left : left + self._side]
        contrast, brightness = rng.uniform(0.4, 1.4), rng.uniform(-0.3, 0.3)
        return (crop / 255.0 * contrast + brightness).astype(np.float32)

    def _put_digit(
        self,
        image: npt.NDArray[np.float32],
        mask: npt.NDArray[np.int64],
        indices: npt.NDArray[np.int64],
        rng: np.random.Generator,
    ) -> None:
        index = indices[rng.integers(len(indices))]
        side = int(rng.integers(18, 31))
        top, left = _least_covered_place(mask, side, rng)
        tint = rng.uniform(0.0, 1.0, 3).astype(np.float32)
        ink = np.asarray(
            Image.fromarray(self._ink[index]).resize((side, side), Image.Resampling.BILINEAR)
        )
        place = _square(top, left, side)
        opacity = ink[..., None]
        image[place] = image[place] * (1 - opacity) + opacity * tint
        mask[place][ink > INK_THRESHOLD] = self._values[index] + 1


def _least_covered_place(
    mask: npt.NDArray[np.int64], side: int, rng: np.random.Generator
) -> tuple[int, int]:
    """Draws some places for a square and returns the one (top, left) that hides least."""
    places = rng.integers(len(mask) - side + 1, size=(PLACES, 2)).tolist()
    covered = [np.count_nonzero(mask[_square(top, left, side)]) for top, left in places]
    top, left = places[int(np.argmin(covered))]
    return top, left


def _square(top: int, left: int, side: int) -> tuple[slice, slice]:
    return slice(top, top + side), slice(left, left + side)


def _photograph(name: str) -> npt.NDArray[np.uint8]:
    """Loads a photograph that scikit-image ships, [height, width, 3]."""
    with Image.open(Path(skimage.__file__).parent / "data" / name) as image:
        return np.asarray(image.convert("RGB"))


def training_batch(source: SceneSource, seed: int, step: int, indices: range) -> Batch:
    """Draws the scenes of the global batch of `step` that `indices` names.

    A scene depends on (seed, step, its index in the global batch) alone, so that splitting the
    batch over ranks does not change the data.
    """
    return _join([source.training_scene(np.random.default_rng((seed, step, i))) for i in indices])


def held_out_batch(source: SceneSource) -> Batch:
    """Makes the scenes that every scope and every seed is judged by."""
    return _join(source.held_out_scenes())


def _join(scenes: list[Scene]) -> Batch:
    return Batch(
        torch.from_numpy(np.stack([scene.image for scene in scenes])),
        torch.from_numpy(np.stack([scene.mask for scene in scenes])),
    )
