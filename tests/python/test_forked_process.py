# SPDX-License-Identifier: Apache-2.0
"""A process that is forked from a rank, like a data loader's worker, does not act as the rank."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool, error_of
from torch import distributed

import normscope

PATIENCE_SECONDS = 60.0


def fork() -> int:
    """Call os.fork after a collection: collecting torch's garbage in the fork would crash it."""
    gc.collect()
    return os.fork()


def answer_of_fork(call: Callable[[], str]) -> str:
    """Return the result of ``call`` in a process that is forked from this one and then exits."""
    ours, theirs = os.pipe()
    process = fork()
    if process == 0:
        try:
            os.write(theirs, call().encode())
        except BaseException as error:
            os.write(theirs, repr(error).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        text = answer.read()
    os.waitpid(process, 0)
    return text


def step(layer: torch.nn.Module, value: float) -> None:
    """Run a training step on a batch that is filled with a value."""
    layer(torch.full((2, 1), value, requires_grad=True)).sum().backward()


def running_mean_of(layer: normscope.BatchNorm1d) -> float:
    assert layer.running_mean is not None
    return layer.running_mean.item()


def forks_and_trains(scope: str, has_met: bool) -> tuple[str, float]:  # noqa: FBT001
    rank = distributed.get_rank()
    layer = normscope.BatchNorm1d(1, momentum=1.0, scope=scope)
    if has_met:
        step(layer, float(rank))
    message = answer_of_fork(lambda: error_of(lambda: step(layer, 1e3))) if rank == 0 else ""
    for _ in range(3):
        step(layer, float(rank))
    return message, running_mean_of(layer)


@pytest.mark.parametrize("scope", ["world", "group:2", "norm_batch:4"])
@pytest.mark.parametrize("has_met", [True, False])
def test_a_fork_of_a_rank_is_told_and_the_ranks_go_on(
    ranks: RankPool, environment: dict[str, str], scope: str, *, has_met: bool
) -> None:
    [(message, of_rank_0), (_, of_rank_1)] = ranks.run(
        2,
        forks_and_trains,
        scope,
        has_met,
        hang_seconds=PATIENCE_SECONDS,
        environment=environment,
    )

    assert "was forked from rank 0 of 2" in message
    assert "scope local" in message
    assert of_rank_0 == of_rank_1 == 0.5


def fork_runs_what_needs_no_peers() -> str:
    layer = normscope.BatchNorm1d(1)
    step(layer, 1.0)

    def alone() -> str:
        # Only forwards: torch refuses a backward in the fork of a process that has run one.
        batch = torch.ones(4, 1)
        normscope.BatchNorm1d(1, scope="local")(batch)
        normscope.BatchNorm1d(1, scope="slices:2")(batch)
        layer.eval()(batch)
        return "ran"

    return answer_of_fork(alone)


def test_a_fork_of_a_rank_runs_what_needs_no_peers(ranks: RankPool) -> None:
    assert ranks.run(2, fork_runs_what_needs_no_peers) == ["ran", "ran"]


def fork_calls_badly_and_ends_as_a_program_does() -> float:
    """Let a fork fail in a layer and exit, which destroys its copies of the communicators."""
    rank = distributed.get_rank()
    layer = normscope.BatchNorm1d(1, momentum=1.0)
    step(layer, float(rank))
    process = fork()
    if process == 0:
        with contextlib.suppress(Exception):
            layer(None)
        # Does what sys.exit() does; its exception would be caught by the pool.
        atexit._run_exitfuncs()
        ctypes.CDLL(None).exit(0)
    os.waitpid(process, 0)
    step(layer, float(rank))
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == 2.0
    return running_mean_of(layer)


@pytest.mark.slow
def test_the_exit_of_a_fork_does_not_affect_the_rank(environment: dict[str, str]) -> None:
    # Uses new processes: the threads of torch's profiler survive other tests, and a fork waits for
    # them when it exits.
    ranks = RankPool()
    try:
        answers = ranks.run(
            2,
            fork_calls_badly_and_ends_as_a_program_does,
            hang_seconds=PATIENCE_SECONDS,
            environment=environment,
        )
    finally:
        ranks.close()

    assert answers == [0.5, 0.5]
