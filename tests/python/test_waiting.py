# SPDX-License-Identifier: Apache-2.0
"""What can be known and done while ranks wait for each other."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed
from torch.profiler import ProfilerActivity, profile

import normscope

SECONDS = 2.0


def network() -> torch.nn.Sequential:
    return normscope.convert(torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)))


def batch() -> torch.Tensor:
    return torch.randn(2, 3, 4, 4)


def raised_by(call: Callable[[], Any]) -> tuple[str, float]:
    """Return what a call raises, and the seconds until then."""
    begin = time.monotonic()
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", 0.0


def meet_at(name: str) -> None:
    """Wait for all ranks without sending messages in a group."""
    store = distributed.distributed_c10d._get_default_store()
    store.set(f"{name}/{distributed.get_rank()}", "")
    store.wait([f"{name}/{rank}" for rank in range(distributed.get_world_size())])


def status_with(text: str, process: int | None = None) -> str:
    """Return the status of a process, this one by default, as soon as it contains a text."""
    while text not in (status := normscope.status(process)):
        time.sleep(0.01)
    return status


@contextlib.contextmanager
def errors_to(text: list[str]) -> Iterator[None]:
    """Collect everything that the process writes to stderr in a list."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        text.append(file.read().decode())


def rank_1_is_late(seconds: float) -> str:
    net = network()
    x = net[0](batch())
    meet_at("begin")
    if distributed.get_rank() == 1:
        time.sleep(seconds)
    text: list[str] = []
    with errors_to(text):
        net[1](x)
    return text[0]


@pytest.mark.slow
def test_a_long_wait_is_logged_once(ranks: RankPool, environment: dict[str, str]) -> None:
    environment = environment | {"NORMSCOPE_WARN_AFTER": "1"}

    waiting, late = ranks.run(2, rank_1_is_late, 3.0, environment=environment)

    assert waiting.count("normscope has waited") == 1
    assert "rank 1 last finished forward of 0, " in waiting
    assert "rank 0 waits in forward of 1" in waiting
    assert late == ""


@pytest.mark.parametrize("limit", ["0", "30"])
def test_a_short_wait_is_not_logged(ranks: RankPool, limit: str) -> None:
    environment = {"NORMSCOPE_WARN_AFTER": limit}

    assert ranks.run(2, rank_1_is_late, 1.0, environment=environment) == ["", ""]


def status_of_a_rank_that_waits() -> tuple[str, str]:
    net = network()
    x = net[0](batch())
    store = distributed.distributed_c10d._get_default_store()
    if distributed.get_rank() == 1:
        store.set("process", str(os.getpid()))
        net[1](x)
        return "", ""
    of_peer = status_with("rank 1 waits", int(store.get("process")))
    own = normscope.status()
    net[1](x)
    return of_peer, own


def test_the_status_of_a_process_that_waits_can_be_read(
    ranks: RankPool, transport: str, environment: dict[str, str]
) -> None:
    [(of_peer, own), _] = ranks.run(2, status_of_a_rank_that_waits, environment=environment)

    assert "is rank 1 of 2: " in of_peer
    assert "rank 1 waits in forward of 1" in of_peer
    assert "is rank 0 of 2: rank 0 last finished forward of 0, " in own
    finished = re.search(r"rank 0 last finished forward of 0, ([\d.]+) s ago", of_peer)
    if transport == "shared memory":
        assert finished
    else:  # over Gloo, others see a call that is older than half the limit of a warning
        assert finished is None or float(finished[1]) >= 15


def rank_0_fails_while_its_thread_waits() -> list[tuple[str, float]]:
    """Return what fail_fast raises, and on rank 0 also what its other thread does."""
    net = network()
    net(batch())
    meet_at("begin")
    answers, of_other = [], []
    other = threading.Thread(target=lambda: of_other.append(raised_by(lambda: net(batch()))))

    def step() -> None:
        with normscope.fail_fast():
            if distributed.get_rank() == 0:
                raise LookupError("no such file")
            net(batch())

    if distributed.get_rank() == 0:
        other.start()
        status_with("waits in forward")
        answers.append(raised_by(step))
        meet_at("failed")
        other.join()
    else:
        meet_at("failed")
        answers.append(raised_by(step))
    return answers + of_other


def test_a_rank_fails_at_once_while_another_of_its_threads_waits(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    of_rank_0, of_peer = ranks.run(2, rank_0_fails_while_its_thread_waits, environment=environment)

    assert of_rank_0[0][0] == "LookupError: no such file"
    for error, _ in (of_rank_0[1], of_peer[0]):
        assert "LookupError: no such file" in error
    assert max(seconds for _, seconds in (of_rank_0[0], of_peer[0])) < SECONDS


def python_runs_while_ops_wait() -> None:
    """Make rank 0 wait in a forward for rank 1, which waits for another thread of rank 0."""
    store = distributed.distributed_c10d._get_default_store()
    net = network()
    net(batch())
    if distributed.get_rank() == 0:
        threading.Timer(0.2, lambda: store.set("go", "")).start()
    else:
        store.wait(["go"])
    net(batch())


def test_an_op_that_waits_does_not_hold_python_s_lock(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    ranks.run(2, python_runs_while_ops_wait, hang_seconds=30.0, environment=environment)


def signalled_without_an_exception() -> list[int]:
    """Use a handler that returns, for example to request a checkpoint; the wait continues."""
    store = distributed.distributed_c10d._get_default_store()
    net = network()
    net(batch())
    calls: list[int] = []

    def signal_the_wait() -> None:
        status_with("waits in forward")
        os.kill(os.getpid(), signal.SIGUSR1)
        while not calls:
            time.sleep(0.01)
        store.set("handled", "")

    if distributed.get_rank() == 1:
        store.wait(["handled"])
        net(batch())
        return calls
    before = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    signals = threading.Thread(target=signal_the_wait)
    signals.start()
    net(batch())
    signals.join()
    signal.signal(signal.SIGUSR1, before)
    return calls


def test_a_handler_that_returns_does_not_end_the_wait(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    answers = ranks.run(2, signalled_without_an_exception, environment=environment)

    assert answers == [[signal.SIGUSR1], []]


def profiled_events() -> list[tuple[str, float]]:
    store = distributed.distributed_c10d._get_default_store()
    net = network()
    net(batch().requires_grad_()).sum().backward()
    if distributed.get_rank() == 0:
        store.set("process", str(os.getpid()))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        if distributed.get_rank() == 1:
            status_with("rank 0 waits", int(store.get("process")))
            time.sleep(0.2)
        net(batch().requires_grad_()).sum().backward()
    return [
        (event.key, event.cpu_time_total / 1e6)
        for event in profiler.key_averages()
        if event.key.startswith("normscope::exchange") or event.key == "normscope::wait"
    ]


def test_the_profiler_shows_exchanges_and_their_waits(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    [events, _] = ranks.run(2, profiled_events, environment=environment)

    seconds = dict(events)
    names = {re.sub(r"[0-9]+ bytes", "N bytes", name) for name in seconds}
    assert names == {
        "normscope::wait",
        *(
            f"normscope::exchange {direction} of {layer}, scope world, N bytes"
            for layer in "01"
            for direction in ("forward", "backward")
        ),
    }
    assert 0.1 < seconds["normscope::wait"] < sum(seconds.values()) - seconds["normscope::wait"]
