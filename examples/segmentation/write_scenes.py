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

from scenes import Batch, SceneSource, held_out_batch, training_batch
from settings import SIDE, Settings

MAGIC = b"SCENES01"


def write_scenes(source: SceneSource, settings: Settings, path: Path) -> None:
    """Writes the scenes that the first of the seeds draws, and those held out."""
    held_out = held_out_batch(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        header = [settings.steps, settings.global_batch, SIDE, len(source.class_names)]
        file.write(MAGIC + np.array([*header, len(held_out.images)], np.int64).tobytes())
        for step in tqdm(range(settings.steps), desc=str(path), unit=" steps"):
            indices = range(settings.global_batch)
            _write(file, training_batch(source, settings.seeds[0], step, indices))
        _write(file, held_out)


def _write(file: BinaryIO, batch: Batch) -> None:
    for image, mask in zip(batch.images, batch.masks, strict=True):
        file.write(image.numpy().tobytes() + mask.numpy().astype(np.uint8).tobytes())


def main() -> None:
    """Writes the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="what to write")
    parser.add_argument(
        "--steps", type=int, default=700, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--global-batch", type=int, default=8, help="scenes a step (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the scenes (default: %(default)s)")
    parser.add_argument("--data", help="folder of your own pictures, as run.py takes it")
    given = parser.parse_args()
    settings = Settings(1, given.global_batch, given.steps, (given.seed,), "cpu", given.data)
    write_scenes(settings.source(), settings, given.file)


if __name__ == "__main__":
    main()
