# SPDX-License-Identifier: Apache-2.0
"""Takes the first step of the demo on several processes, and prints a hash of what it left.

The programs of examples/cpp print the same hash of the running statistics, to the bit, where they
have as many ranks, the same scope and the same scenes.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from launch import launch
from rank import Rank, run_as_rank
from settings import Settings
from training import Trainer


def hash_of_statistics(network: torch.nn.Module) -> str:
    """FNV-1a of the bits of all running statistics, in the order of the layers."""
    value = 14695981039346656037
    for name, buffer in network.named_buffers():
        if name.endswith("num_batches_tracked"):
            continue
        for byte in buffer.numpy().tobytes():
            value = ((value ^ byte) * 1099511628211) % 2**64
    return f"{value:016x}"


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int, default=4, help="number of processes (default: %(default)s)"
    )
    parser.add_argument(
        "--global-batch", type=int, default=8, help="scenes a step (default: %(default)s)"
    )
    parser.add_argument("--scope", default="world", help="of the statistics (default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first weights and of the scenes (default: %(default)s)",
    )
    parser.add_argument("--data", help="folder of your own pictures, as run.py takes it")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def take_first_step(given: argparse.Namespace, rank: Rank) -> None:
    """One rank's part."""
    images = given.global_batch // rank.count
    settings = Settings(rank.count, images, 1, (given.seed,), "cpu", given.data)
    share = rank.share(settings.global_batch)
    trainer = Trainer(settings.source(), settings, given.seed, given.scope, share)
    trainer.step(0)
    if rank.number == 0:
        print(
            f"running statistics after the first step: {hash_of_statistics(trainer.network)}",
            flush=True,
        )


def main() -> None:
    """Starts the ranks."""
    given = parse_arguments()
    if given.is_rank:
        record(run_as_rank)(functools.partial(take_first_step, given))
    else:
        launch(Path(__file__).name, given.ranks, [*sys.argv[1:], "--is-rank"], port=None)


if __name__ == "__main__":
    main()
