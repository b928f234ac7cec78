# SPDX-License-Identifier: Apache-2.0
"""Trains networks under recommended scopes and other rules, and prints the quality.

One process stands for all ranks; with --on-ranks there is a process for each.
"""

from __future__ import annotations

import argparse
import os
import warnings
from itertools import product
from pathlib import Path

import torch

import normscope
from scope_measures import layers_of, steps_of_a_plan
from scope_results import Result, append, line, read, table
from scope_rules import Scopes, apply, prices_of, schedule_of, with_group_norm
from scope_tasks import STEPS, Setting, Task
from scopes_on_ranks import train_on_ranks

DEFAULT_SCOPES = ("world", "local", "pooled", "random", "recommended", "kept")
GROUP_NORM = "group-norm"


def train(setting: Setting, scopes: str, seed: int) -> Result:
    """Train in one process under the given `scopes` (see scope_rules.schedule_of)."""
    if scopes == GROUP_NORM:
        return _train_with_group_norm(setting, seed)
    task = Task(setting, seed)
    schedule = schedule_of(scopes, task.steps, setting.ranks)
    prices = prices_of(task)
    chosen: Scopes = {}
    sent = 0
    for step in range(task.steps):
        if step in schedule:
            chosen = schedule[step](task)
            apply(task.model, chosen, setting.ranks)
        task.step(step)
        sent += _bytes(chosen, prices)
    batches = [task.images(step) for step in steps_of_a_plan(task)]
    normscope.estimate_running_stats(task.model.train(), batches)
    wide = {layer: scope for layer, scope in chosen.items() if scope != "local"}
    return Result(
        str(setting),
        scopes,
        seed,
        task.quality(),
        sent / task.steps / sum(prices.values()),
        _bytes(chosen, prices) / sum(prices.values()),
        len(wide) / len(layers_of(task.model)),
        wide,
    )


def _bytes(scopes: Scopes, prices: dict[str, int]) -> int:
    return sum(prices[layer] for layer, scope in scopes.items() if scope != "local")


def _train_with_group_norm(setting: Setting, seed: int) -> Result:
    task = Task(setting, seed, change=with_group_norm)
    for step in range(task.steps):
        task.step(step)
    return Result(str(setting), GROUP_NORM, seed, task.quality(), 0.0, 0.0, 0.0, {})


def _known(results: list[Result], setting: Setting, scopes: str, seed: int) -> Result | None:
    key = (str(setting), scopes, seed)
    return next((one for one in results if (one.task, one.scopes, one.seed) == key), None)


def _claimed(folder: Path, setting: Setting, scopes: str, seed: int) -> bool:
    """Return whether no other process that shares the folder trains this."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{setting} {scopes} {seed}".replace("/", "_")
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def main() -> None:
    """Train every task under every choice of scopes from every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tasks",
        nargs="+",
        type=Setting.parse,
        default=[Setting(name) for name in ("land-pyramid", "land-unet", "land-demo")],
        metavar="NAME[@RANKSxIMAGES]",
        help=f"of {', '.join(STEPS)}; four ranks of two images if not said otherwise",
    )
    parser.add_argument(
        "--scopes",
        nargs="+",
        default=DEFAULT_SCOPES,
        help="world, local, progressive, pooled, group-norm, recommended[=NOISE], kept[=NOISE], "
        "random[=NOISE], MEASURE=SHARE%% with one of noise, values, gradient, loss and chance, "
        "values<4, sum<0.8, all-but:PATTERN+PATTERN; benchmarks/scope_rules.py explains them "
        "(default: %(default)s)",
    )
    parser.add_argument("--seeds", nargs=2, type=int, default=[3, 8], metavar=("FIRST", "END"))
    parser.add_argument("--on-ranks", action="store_true", help="train in a process per rank")
    parser.add_argument(
        "--results", type=Path, help="append every training to FILE; existing ones are not repeated"
    )
    parser.add_argument(
        "--claims",
        type=Path,
        help="share the work with other processes that have the same FOLDER; no table",
    )
    parser.add_argument("--table", action="store_true", help="print the results of the file alone")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # plans at initial weights say that they are
    known = read(given.results) if given.results else []
    results = []
    for seed, setting, scopes in product(range(*given.seeds), given.tasks, given.scopes):
        result = _known(known, setting, scopes, seed)
        if result is None:
            if given.table or (given.claims and not _claimed(given.claims, setting, scopes, seed)):
                continue
            run = train_on_ranks if given.on_ranks else train
            result = run(setting, scopes, seed)
            print(line(result), flush=True)
            if given.results:
                append(given.results, result)
        results.append(result)
    if not given.claims:
        print(table(sorted(results, key=lambda one: (one.task, given.scopes.index(one.scopes)))))


if __name__ == "__main__":
    main()
