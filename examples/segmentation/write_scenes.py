# SPDX-License-Identifier: Apache-2.0
"""Writes the demo's scenes to a file, for programs that are not written in Python.

The file starts with a header of the eight bytes SCENES01 and five int64: steps, global batch, side,
classes and held-out scenes. It is followed by the scenes of the global batch of each step, and the
held-out scenes. Each scene is an image [3, side, side] in float32 and a mask [side, side] in uint8.
Everything is in the machine's byte order.

With --first-step, the program also runs the first step on several processes and prints a hash of
the running statistics. The programs of examples/cpp print the same hash with the same number of
ranks.
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
    """Writes the scenes of a batch."""
    for image, mask in zip(*batch, strict=True):
        file.write(image.numpy().tobytes() + mask.numpy().astype(np.uint8).tobytes())


def take_first_step(rank: int, settings: Settings, seed: int, scope: str) -> None:
    """Runs the first step on one rank; rank 0 prints the FNV-1a hash of all running statistics."""
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
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--first-step", metavar="SCOPE", help="scope of the step, such as world")
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
