# SPDX-License-Identifier: Apache-2.0
"""Trains networks under recommended scopes, and prints the quality for each wanted number.

One process stands for four ranks of two images; with --on-ranks there are four processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

import normscope
from scope_layers import layer_table
from scope_results import Result, append, line, read, table
from scope_rules import Scopes, apply, never_changes, plan_of, schedule_of, steps_of_a_plan
from scope_tasks import RANKS, STEPS, make_task
from scopes_on_ranks import train_on_ranks

DEFAULT_SCOPES = ("world", "local", "progressive", "4", "8", "16")


def train(task_name: str, scopes: str, seed: int, known: Iterable[Result]) -> Result:
    """Train in one process under the given `scopes` (see scope_rules.schedule_of).

    A training with constant scopes is not repeated if a known result has the same scopes.
    """
    task = make_task(task_name, seed)
    schedule = schedule_of(scopes, task.steps, seed)
    bytes_of = {layer.layer: layer.exchange_bytes for layer in plan_of(task).layers}
    wide: Scopes = {}
    exchanges = sent = 0
    for step in range(task.steps):
        if step in schedule:
            chosen = schedule[step](task)
            wide = {layer: scope for layer, scope in chosen.items() if scope != "local"}
            same = _same(known, task_name, seed, wide) if never_changes(scopes) else None
            if same is not None:
                return replace(same, scopes=scopes)
            apply(task.model, chosen)
        task.step(step)
        exchanges += len(wide)
        sent += sum(bytes_of[layer] for layer in wide)
    normscope.estimate_running_stats(
        task.model, [task.images(each) for each in steps_of_a_plan(task)]
    )
    return Result(
        task_name,
        scopes,
        seed,
        task.quality(),
        exchanges / (task.steps * len(bytes_of)),
        sent / (task.steps * sum(bytes_of.values())),
        wide,
    )


def _same(known: Iterable[Result], task: str, seed: int, wide: Scopes) -> Result | None:
    """Return the result of a training that had these scopes in all steps, if there is one."""
    of_seed = (one for one in known if (one.task, one.seed, one.processes) == (task, seed, 1))
    return next(
        (one for one in of_seed if one.wide_layers == wide and never_changes(one.scopes)), None
    )


def _known(
    known: Iterable[Result], task: str, seed: int, scopes: str, processes: int
) -> Result | None:
    wanted = (task, seed, scopes, processes)
    return next(
        (one for one in known if (one.task, one.seed, one.scopes, one.processes) == wanted), None
    )


def main() -> None:
    """Train every task under every choice of scopes from every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument(
        "--scopes",
        nargs="+",
        default=DEFAULT_SCOPES,
        help="local, world, progressive, 4 (a plan for this many values), RULE=4 (by RULE, with "
        "the cost of the plan 4), RULE=25%% (of world's exchanges), RULE@100=4 (applied at step "
        "100), where RULE is noise, noise-per-byte, loss or random, only:LAYER, all-but:LAYER "
        "(default: %(default)s)",
    )
    parser.add_argument("--seeds", nargs=2, type=int, default=[0, 5], metavar=("FIRST", "END"))
    parser.add_argument("--on-ranks", action="store_true", help="train in 4 processes")
    parser.add_argument(
        "--results", type=Path, help="append every training to FILE; existing ones are not repeated"
    )
    parser.add_argument(
        "--layers", action="store_true", help="print the criteria of the rules instead of training"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = read(given.results) if given.results else []
    if given.layers:
        for task in given.tasks:
            print(layer_table(task, range(*given.seeds), known))
        return
    results = []
    for task, seed, scopes in product(given.tasks, range(*given.seeds), given.scopes):
        result = _known(known, task, seed, scopes, RANKS if given.on_ranks else 1)
        if result is None:
            result = (
                train_on_ranks(task, scopes, seed)
                if given.on_ranks
                else train(task, scopes, seed, known)
            )
            known.append(result)
            print(line(result), flush=True)
            if given.results:
                append(given.results, result)
        results.append(result)
    print(table(results))


if __name__ == "__main__":
    main()
