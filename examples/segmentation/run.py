# SPDX-License-Identifier: Apache-2.0
"""Trains a small segmentation network under several scopes and tells what the scope did.

Real photographs with real handwritten digits on them, a network in the manner of DeepLab, several
processes, and per scope a progress bar. At the end a table, and report.html in the output folder.
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
group:4, ..., world, each for an equal part of the steps), {RECOMMENDED} (for each layer what
normscope.recommend_scopes finds); default: local slices group:2 world {RECOMMENDED}
"""


def run_rank(rank: int, settings: Settings, scopes: list[str], seeds: range, output: Path) -> None:
    """One rank's part: every scope from every seed; rank 0 reports.

    Scopes follow each other under each seed, so that a machine that grows slower meanwhile is
    slower for all of them.
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
            continue  # to the next scope, where the others wait for rank 0
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
        help="train from several seeds, --seed and those that follow it, and tell mean and "
        "standard deviation (without a number: %(const)s seeds)",
    )
    output = Path(__file__).with_name("output")
    parser.add_argument("--output", type=Path, default=output, metavar="DIR", help="for the report")
    settings, given = parse(parser)
    try:
        scopes = settings.scopes(given.scopes)
        settings.source()  # A malformed folder ends the run here, before any rank starts.
    except ValueError as error:
        parser.error(str(error))
    given.output.mkdir(parents=True, exist_ok=True)
    seeds = range(given.seed, given.seed + given.thorough)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            # An exit as any other, which ends the ranks too.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        start_ranks(run_rank, settings.ranks, settings, scopes, seeds, given.output)
    except ProcessException as error:
        sys.exit(f"run.py: {error}")


if __name__ == "__main__":
    main()
