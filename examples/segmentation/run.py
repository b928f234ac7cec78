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
from types import FrameType

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from check import compare
from processes import cores, start_ranks
from report import Report
from scenes import Batch
from settings import PROGRESSIVE, RECOMMENDED, Settings, add_arguments, positive
from train import train

CHECK_FAILED = 1
REFUSED = 2


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--scopes",
        nargs="+",
        metavar="SCOPE",
        help="scopes to compare: local, slices (one process, as many slices as ranks), slices:K, "
        "group:K, world, progressive (local, group:2, group:4, ..., world, each for an equal part "
        "of the steps), recommended (for each layer what normscope.recommend_scopes finds) "
        "(default: local slices group:2 world recommended; group:2 where there are more ranks "
        "than 2 and an even number)",
    )
    parser.add_argument(
        "--thorough",
        type=positive,
        nargs="?",
        const=5,
        default=1,
        metavar="SEEDS",
        help="train every scope from several seeds, --seed and those that follow it, and tell mean "
        "and standard deviation (without a number: %(const)s seeds)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("output"),
        metavar="DIR",
        help="folder for report.html and metrics.json (default: %(default)s)",
    )
    return parser.parse_args()


def run_rank(rank: int, settings: Settings, scopes: list[str], seeds: range, output: Path) -> None:
    """One rank's part: the check, every scope from every seed; rank 0 reports.

    Scopes follow each other under each seed, so that a machine that grows slower meanwhile is
    slower for all of them.
    """
    source = settings.source()
    held_out = Batch.of(source.held_out_scenes())
    comparisons = []
    for scope in scopes:
        if not scope.startswith("slices") and scope not in (PROGRESSIVE, RECOMMENDED):
            comparison = compare(source, settings, seeds[0], scope, rank)
            if comparison is not None:
                print(comparison, flush=True)
                comparisons.append(comparison)
    everyone, alone = dist.new_group(), dist.new_group([0])
    trainings = []
    for seed, scope in itertools.product(seeds, scopes):
        if not scope.startswith("slices"):
            share, group = settings.share(rank), everyone
        elif rank == 0:
            share, group = range(settings.global_batch), alone
        else:
            continue  # to the next scope, where the others wait for rank 0
        torch.set_num_threads(max(1, cores() // dist.get_world_size(group)))
        trainings.append(train(source, held_out, settings, seed, scope, share, group))
    if rank == 0:
        report = Report(settings, source.class_names, held_out, comparisons, trainings)
        report.save(output, shlex.join(["python", *sys.argv]))
        print(f"\n{report.table()}\n\nPictures and curves: {output / 'report.html'}")
        if not all(comparison.passed for comparison in comparisons):
            sys.exit(CHECK_FAILED)


def leave_on_signals() -> None:
    """Makes Ctrl-C, a request to end and a closed terminal end the ranks too.

    A signal that the caller has set to be ignored, as nohup does, stays ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    print(f"run.py: ended by {signal.Signals(number).name}", file=sys.stderr)
    sys.exit(128 + number)


def main() -> int:
    """Runs the demo as the command line asks."""
    given = parse_arguments()
    leave_on_signals()
    try:
        settings = Settings.of(given)
        wanted = given.scopes or settings.default_scopes()
        scopes = list(dict.fromkeys(settings.scope(scope) for scope in wanted))
        settings.source()  # A malformed folder ends the run here, before any rank starts.
        given.output.mkdir(parents=True, exist_ok=True)
        seeds = range(given.seed, given.seed + given.thorough)
        start_ranks(run_rank, settings.ranks, settings, scopes, seeds, given.output)
    except (ValueError, ProcessRaisedException, ProcessExitedException) as error:
        if isinstance(error, ProcessExitedException) and error.exit_code == CHECK_FAILED:
            print("run.py: the check failed, see above", file=sys.stderr)
            return CHECK_FAILED
        print(f"run.py: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
