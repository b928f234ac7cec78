# SPDX-License-Identifier: Apache-2.0
"""Trains a small segmentation network under several scopes, and compares the results.

It uses real photographs with real handwritten digits on them, a network similar to DeepLab, and
several processes. It prints a progress bar for each scope and a table at the end, and writes
report.html to the output folder.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from processes import share_cores, start_ranks
from report import Trainings, write_report
from scenes import Batch
from settings import PROGRESSIVE, RECOMMENDED, Settings, parse, positive
from trainer import Trainer, train

SCOPES = f"""
local, slices (one process, as many slices as ranks), group:K, world, {PROGRESSIVE} (local, group:2,
group:4, ..., world, each for an equal part of the steps), {RECOMMENDED} (the scopes that
normscope.recommend_scopes finds for each layer); default: local slices group:2 world {RECOMMENDED}
"""


def run_rank(rank: int, settings: Settings, scopes: list[str], seeds: range, output: Path) -> None:
    """Trains every scope from every seed on one rank; rank 0 writes the report.

    The scopes alternate for each seed: if the machine becomes slower, this affects all of them.
    """
    source = settings.source()
    held_out = Batch.of(source.held_out_scenes())
    everyone, alone = dist.new_group(), dist.new_group([0])
    trainings: Trainings = {scope: [] for scope in scopes}
    for seed, scope in itertools.product(seeds, scopes):
        if not scope.startswith("slices"):
            share, group = settings.share(rank), everyone
        elif rank == 0:
            share, group = range(settings.global_batch), alone
        else:
            continue  # with the next scope, where the others wait for rank 0
        share_cores(dist.get_world_size(group))
        trainer = Trainer(source, settings, seed, scope, share)
        trainings[scope].append(train(trainer, held_out, group))
    if rank == 0:
        command = shlex.join(["python", *sys.argv])
        print(f"\n{write_report(output, command, settings, source, trainings)}\n")
        print(f"Pictures and curves: {output / 'report.html'}")


def main() -> None:
    """Runs the demo as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scopes", nargs="+", metavar="SCOPE", help=f"to compare: {SCOPES}")
    parser.add_argument(
        "--thorough",
        type=positive,
        nargs="?",
        const=5,
        default=1,
        metavar="SEEDS",
        help="train from several seeds, --seed and those that follow it, and report mean and "
        "standard deviation (without a number: %(const)s seeds)",
    )
    output = Path(__file__).with_name("output")
    parser.add_argument("--output", type=Path, default=output, metavar="DIR", help="for the report")
    settings, given = parse(parser)
    try:
        scopes = settings.scopes(given.scopes)
        settings.source()  # a malformed folder is refused here, before any rank starts
    except ValueError as error:
        parser.error(str(error))
    given.output.mkdir(parents=True, exist_ok=True)
    seeds = range(given.seed, given.seed + given.thorough)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores signals
            # Exits normally, which stops the ranks too.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        start_ranks(run_rank, settings.ranks, settings, scopes, seeds, given.output)
    except ProcessException as error:
        sys.exit(f"run.py: {error}")


if __name__ == "__main__":
    main()
