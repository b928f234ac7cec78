# SPDX-License-Identifier: Apache-2.0
"""Takes the first step of the demo on several processes, and prints a hash of what it left.

The programs of examples/cpp print the same hash of the running statistics, to the bit, where they
have as many ranks, the same scope and the same scenes.
"""

from __future__ import annotations

import argparse

import torch

from processes import start_ranks
from settings import Settings, add_arguments
from trainer import Trainer


def hash_of_statistics(network: torch.nn.Module) -> str:
    """FNV-1a of the bits of all running statistics, in the order of the layers."""
    value = 14695981039346656037
    for name, buffer in network.named_buffers():
        if name.endswith("num_batches_tracked"):
            continue
        for byte in buffer.numpy().tobytes():
            value = ((value ^ byte) * 1099511628211) % 2**64
    return f"{value:016x}"


def take_first_step(rank: int, settings: Settings, seed: int, scope: str) -> None:
    """One rank's part."""
    trainer = Trainer(settings.source(), settings, seed, scope, settings.share(rank))
    trainer.step(0)
    if rank == 0:
        hash_ = hash_of_statistics(trainer.network)
        print(f"running statistics after the first step: {hash_}", flush=True)


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--scope", default="world", help="of the statistics (default: %(default)s)")
    given = parser.parse_args()
    settings = Settings.of(given)
    start_ranks(take_first_step, settings.ranks, settings, given.seed, given.scope)


if __name__ == "__main__":
    main()
