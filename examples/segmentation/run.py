# SPDX-License-Identifier: Apache-2.0
"""Trains a small segmentation network under several scopes, and compares the results.

It uses real photographs with real handwritten digits on them, a network similar to DeepLab, and
several processes. It prints an estimate of its time, a line for each training and a table, and
writes report.html to the output folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from processes import share_cores, start_ranks
from report import Trainings, write_report
from scenes import Batch, SceneSource
from settings import PROGRESSIVE, RECOMMENDED, Settings, parse, positive
from trainer import EVALUATION_STEPS, Trainer, train

SCOPES = f"""
local, slices (one process, as many slices as ranks), group:K, world, {PROGRESSIVE} (local, group:2,
group:4, ..., world, each for an equal part of the steps), {RECOMMENDED} (the scopes that
normscope.recommend_scopes finds for each layer after a quarter of the steps, with world before)
"""
DEFAULT_SCOPES = ["local", "world", RECOMMENDED]

# With --thorough.
SEEDS = 5
THOROUGH_STEPS = 700
THOROUGH_SCOPES = ["local", "slices", "group:2", "world", RECOMMENDED]

# Steps that are timed for the estimate, after one that is not.
TIMED_STEPS = 5


def run_rank(rank: int, settings: Settings, scopes: list[str], seeds: range, output: Path) -> None:
    """Trains every scope from every seed on one rank; rank 0 writes the report.

    The scopes alternate for each seed: if the machine becomes slower, this affects all of them.
    """
    source = settings.source()
    held_out = Batch.of(source.held_out_scenes())
    everyone, alone = dist.new_group(), dist.new_group([0])
    trainings: Trainings = {scope: [] for scope in scopes}
    count = len(scopes) * len(seeds)
    minutes = count * minutes_of_training(source, settings, rank)
    if rank == 0:
        print(
            f"Training {count} times, {settings.steps} steps of {settings.global_batch} images "
            f"each, takes about {minutes:.0f} min.",
            flush=True,
        )
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


def minutes_of_training(source: SceneSource, settings: Settings, rank: int) -> float:
    """Estimates the time of one training from a few steps, together with the other ranks."""
    enough = dataclasses.replace(settings, steps=max(settings.steps, 1 + TIMED_STEPS))
    trainer = Trainer(source, enough, 0, "world", settings.share(rank))
    trainer.step(0)
    start = time.perf_counter()
    for step in range(TIMED_STEPS):
        trainer.step(1 + step)
    seconds_per_step = (time.perf_counter() - start) / TIMED_STEPS
    return seconds_per_step * (settings.steps + EVALUATION_STEPS) / 60


def main() -> None:
    """Runs the demo as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scopes",
        nargs="+",
        metavar="SCOPE",
        help=f"to compare: {SCOPES.strip()}; default: {' '.join(DEFAULT_SCOPES)}",
    )
    parser.add_argument(
        "--thorough",
        type=positive,
        nargs="?",
        const=SEEDS,
        metavar="SEEDS",
        help="train from several seeds, --seed and those that follow it, and report mean and "
        "standard deviation (without a number: %(const)s seeds); more steps and scopes, if these "
        f"are not given: {THOROUGH_STEPS} and {' '.join(THOROUGH_SCOPES)}",
    )
    output = Path(__file__).with_name("output")
    parser.add_argument(
        "--output", type=Path, default=output, metavar="DIR", help="folder for the report"
    )
    settings, given = parse(parser)
    if given.thorough:
        settings = dataclasses.replace(settings, steps=given.steps or THOROUGH_STEPS)
    try:
        default = THOROUGH_SCOPES if given.thorough else DEFAULT_SCOPES
        scopes = settings.scopes(given.scopes or default)
        settings.source()  # a malformed folder is refused here, before any rank starts
    except ValueError as error:
        parser.error(str(error))
    given.output.mkdir(parents=True, exist_ok=True)
    seeds = range(given.seed, given.seed + (given.thorough or 1))
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
