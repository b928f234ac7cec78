# SPDX-License-Identifier: Apache-2.0
"""Writes the demo's scenes to one file, for programs that have no Python to draw them.

The file has a header of eight bytes SCENES01 and five int64: steps, global batch, side, classes and
held-out scenes. Then come the scenes of each step's global batch, and those held out: an image
[3, side, side] of float32 and a mask [side, side] of uint8 each. All in the machine's byte order.

With --first-step it also takes the first step on several processes, and prints a hash of what that
left: the programs of examples/cpp print the same, to the bit, on as many ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from processes import start_ranks
from scenes import SIDE, Batch, training_batch
from settings import Settings, parse
from trainer import Trainer


def write(file: BinaryIO, batch: Batch) -> None:
    """Writes scene by scene."""
    for image, mask in zip(*batch, strict=True):
        file.write(image.numpy().tobytes() + mask.numpy().astype(np.uint8).tobytes())


def take_first_step(rank: int, settings: Settings, seed: int, scope: str) -> None:
    """One rank's part; rank 0 prints FNV-1a of all running statistics, layer by layer."""
    trainer = Trainer(settings.source(), settings, seed, scope, settings.share(rank))
    trainer.step(0)
    if rank == 0:
        hash_ = 14695981039346656037
        for name, buffer in trainer.network.named_buffers():
            for byte in b"" if name.endswith("num_batches_tracked") else buffer.numpy().tobytes():
                hash_ = ((hash_ ^ byte) * 1099511628211) % 2**64
        print(f"running statistics after the first step: {hash_:016x}", flush=True)


def main() -> None:
    """Writes the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="what to write")
    parser.add_argument("--first-step", metavar="SCOPE", help="of the step, such as world")
    settings, given = parse(parser)
    source, indices = settings.source(), range(settings.global_batch)
    held_out = Batch.of(source.held_out_scenes())
    counts = [settings.steps, len(indices), SIDE, len(source.class_names), len(held_out.masks)]
    given.file.parent.mkdir(parents=True, exist_ok=True)
    with given.file.open("wb") as file:
        file.write(b"SCENES01" + np.array(counts, np.int64).tobytes())
        for step in tqdm(range(settings.steps), desc=str(given.file), unit=" steps"):
            write(file, training_batch(source, given.seed, step, indices))
        write(file, held_out)
    if given.first_step is not None:
        start_ranks(take_first_step, settings.ranks, settings, given.seed, given.first_step)


if __name__ == "__main__":
    main()
