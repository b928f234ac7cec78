# SPDX-License-Identifier: Apache-2.0
"""Writes the demo's scenes to one file, for programs that have no Python to draw them.

The file has a header of eight bytes SCENES01 and five int64: steps, global batch, side, classes and
held-out scenes. Then come the scenes of each step's global batch, and those held out: an image
[3, side, side] of float32 and a mask [side, side] of uint8 each. All in the machine's byte order.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from scenes import Batch, training_batch
from settings import SIDE, Settings, add_arguments

MAGIC = b"SCENES01"


def write_scenes(settings: Settings, seed: int, path: Path) -> None:
    """Writes the scenes that a seed draws, and those held out."""
    source = settings.source()
    held_out = Batch.of(source.held_out_scenes())
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        header = [settings.steps, settings.global_batch, SIDE, len(source.class_names)]
        file.write(MAGIC + np.array([*header, len(held_out.images)], np.int64).tobytes())
        for step in tqdm(range(settings.steps), desc=str(path), unit=" steps"):
            _write(file, training_batch(source, seed, step, range(settings.global_batch)))
        _write(file, held_out)


def _write(file: BinaryIO, batch: Batch) -> None:
    for image, mask in zip(batch.images, batch.masks, strict=True):
        file.write(image.numpy().tobytes() + mask.numpy().astype(np.uint8).tobytes())


def main() -> None:
    """Writes the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="what to write")
    add_arguments(parser)
    given = parser.parse_args()
    write_scenes(Settings.of(given), given.seed, given.file)


if __name__ == "__main__":
    main()
