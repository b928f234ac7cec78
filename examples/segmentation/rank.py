# SPDX-License-Identifier: Apache-2.0
"""One process among the ranks that torchrun starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from settings import Settings


@dataclass(frozen=True)
class Rank:
    """A process' number, and how many there are."""

    number: int
    count: int

    def share(self, global_batch: int) -> range:
        """Indices in the global batch that this rank trains on."""
        images = global_batch // self.count
        return range(self.number * images, (self.number + 1) * images)


def run_as_rank(work: Callable[[Rank], None]) -> None:
    """Joins the process group while `work` runs, reproducibly and on its share of the cores.

    A function, not a `with` block, so that what `work` has made is gone before the group is: a
    DistributedDataParallel that held the group's last reference would end it holding the
    interpreter's lock, which Gloo's thread may need to end.
    """
    dist.init_process_group("gloo")
    rank = Rank(dist.get_rank(), dist.get_world_size())
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // rank.count))
    torch.use_deterministic_algorithms(mode=True)
    work(rank)
    # Reached only without an error: leaving in step with a failed rank would mean to wait for it.
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments(description: str | None) -> tuple[Settings, list[str], Path]:
    """Reads what `run.py` passes to each rank: settings, scopes and output folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of settings")
    parser.add_argument("--scopes", required=True, help="scopes of the statistics: A,B,...")
    parser.add_argument("--output", type=Path, required=True, help="folder for results")
    arguments = parser.parse_args()
    return Settings.load(arguments.settings), arguments.scopes.split(","), arguments.output
