# SPDX-License-Identifier: Apache-2.0
"""Trains a small segmentation network under several scopes and tells what the scope did.

Real photographs with real handwritten digits on them, a network in the manner of DeepLab, several
processes, and per scope a progress bar. At the end a table, and report.html in the output folder.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from launch import RanksFailedError, launch
from outcome_table import table
from outcomes import Outcome
from report import Report, write_metrics, write_report
from results import CHECK_FILE, Comparison, load_comparisons
from scenes import held_out_batch
from settings import PROGRESSIVE, Arrangement, Settings, arrange, default_scopes

SETTINGS_FILE = "settings.json"


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--ranks", type=_positive, default=4, help="number of processes (default: %(default)s)"
    )
    parser.add_argument(
        "--images-per-rank",
        type=_positive,
        default=2,
        help="images that one rank trains on in a step; with 1, local cannot train "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--scopes",
        nargs="+",
        metavar="SCOPE",
        help="scopes to compare: local, slices (one process, as many slices as ranks), slices:K, "
        "group:K, world, progressive (local, group:2, group:4, ..., world, each for an equal part "
        "of the steps) (default: local slices group:2 world progressive; group:2 where there are "
        "more ranks than 2 and an even number)",
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=700,
        help="optimizer steps a scope (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first weights and of the scenes (default: %(default)s)",
    )
    parser.add_argument(
        "--thorough",
        type=_positive,
        nargs="?",
        const=5,
        default=1,
        metavar="SEEDS",
        help="train every scope from several seeds, --seed and those that follow it, and tell mean "
        "and standard deviation (without a number: %(const)s seeds)",
    )
    parser.add_argument(
        "--device", choices=["cpu"], default="cpu", help="where to train (default: %(default)s)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of your own pictures, DIR/images and DIR/masks with the same stems (default: "
        "digits on photographs)",
        metavar="DIR",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_name("output"),
        metavar="DIR",
        help="folder for report.html and metrics.json (default: %(default)s)",
    )
    parser.add_argument("--port", type=_positive, help="where ranks meet (default: a free one)")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def run(settings: Settings, arrangements: list[Arrangement], output: Path, port: int | None) -> int:
    """Checks, trains every scope, and reports.

    Returns:
        0 if the check passed, else 1.
    """
    output.mkdir(parents=True, exist_ok=True)
    settings.save(output / SETTINGS_FILE)
    passed_on = [f"--settings={output / SETTINGS_FILE}", f"--output={output}"]
    comparisons = check(settings, arrangements, passed_on, output, port)
    train(arrangements, passed_on, port)
    outcomes = [Outcome.load(output, each, settings.seeds) for each in arrangements]
    source = settings.source()
    report = Report(settings, source.class_names, held_out_batch(source), comparisons, outcomes)
    write_metrics(report, output / "metrics.json")
    write_report(report, output / "report.html")
    print(f"\n{table(outcomes)}\n\nPictures and curves: {output / 'report.html'}")
    if not all(comparison.passed for comparison in comparisons):
        print("run.py: the check failed, see above", file=sys.stderr)
        return 1
    return 0


def check(
    settings: Settings,
    arrangements: list[Arrangement],
    passed_on: list[str],
    output: Path,
    port: int | None,
) -> list[Comparison]:
    """Compares ranks with one process, for the scopes that will be trained on several ranks."""
    scopes = [
        arrangement.scope
        for arrangement in arrangements
        if arrangement.processes > 1 and arrangement.scope != PROGRESSIVE
    ]
    if not scopes:
        return []
    print(f"Check: {settings.ranks} ranks against one process ...", flush=True)
    launch("check.py", settings.ranks, [*passed_on, f"--scopes={','.join(scopes)}"], port)
    comparisons = load_comparisons(output / CHECK_FILE)
    for comparison in comparisons:
        print(comparison, flush=True)
    return comparisons


def train(arrangements: list[Arrangement], passed_on: list[str], port: int | None) -> None:
    """Trains every scope from every seed, with one start for each number of processes."""
    for processes in dict.fromkeys(arrangement.processes for arrangement in arrangements):
        scopes = [each.scope for each in arrangements if each.processes == processes]
        launch("train.py", processes, [*passed_on, f"--scopes={','.join(scopes)}"], port)


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
    leave_on_signals()
    arguments = parse_arguments()
    try:
        settings = Settings(
            ranks=arguments.ranks,
            images_per_rank=arguments.images_per_rank,
            steps=arguments.steps,
            seeds=tuple(range(arguments.seed, arguments.seed + arguments.thorough)),
            device=arguments.device,
            data=None if arguments.data is None else str(arguments.data.resolve()),
        )
        scopes = arguments.scopes or default_scopes(settings.ranks)
        arrangements = dict.fromkeys(
            arrange(scope, settings.ranks, settings.images_per_rank) for scope in scopes
        )
        settings.source()  # A malformed folder ends the run here, before any rank starts.
        return run(settings, list(arrangements), arguments.output, arguments.port)
    except (ValueError, RanksFailedError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
