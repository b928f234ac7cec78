# SPDX-License-Identifier: Apache-2.0
"""The hosts for tests report failures, can be used again, and leave nothing on the machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hosts import Hosts
from rank_pool import RankFailureError
from torch import distributed

PATIENCE_SECONDS = 10.0


def rank_and_host() -> tuple[int, str]:
    return distributed.get_rank(), os.environ["NORMSCOPE_NODE"]


def raise_on_rank_1() -> None:
    if distributed.get_rank() == 1:
        raise ValueError("what rank 1 found")


def die() -> None:
    os._exit(7)


def hang_on_rank_2() -> None:
    if distributed.get_rank() == 2:
        time.sleep(60)


def children_of(process: int) -> list[int]:
    """Return all descendants of a process."""
    found = []
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                for child in map(int, (task / "children").read_text().split()):
                    found += [child, *children_of(child)]
    except FileNotFoundError:  # the process has ended
        pass
    return found


def is_of_hosts(process: int) -> bool:
    """Return whether a process lives, and is not multiprocessing's resource tracker."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False
    return command != b"" and b"resource_tracker" not in command


def test_hosts_report_failures_and_leave_nothing() -> None:
    own_before = set(children_of(os.getpid()))
    links_before = os.listdir("/sys/class/net")

    with Hosts(2) as hosts:
        assert hosts.run((1, 2), rank_and_host) == [(0, "host0"), (1, "host1"), (2, "host1")]
        with pytest.raises(RankFailureError, match=r"(?s)rank 1: .*what rank 1 found"):
            hosts.run((1, 1), raise_on_rank_1)
        with pytest.raises(RankFailureError, match="rank 0: died with exit code 7"):
            hosts.run((1,), die)
        with pytest.raises(ValueError, match="expected 2 hosts at most, got 3"):
            hosts.run((1, 1, 1), die)
        with (
            pytest.raises(RankFailureError, match=r"ranks \[2\] hung"),
            hosts.begun((1, 2), hang_on_rank_2, hang_seconds=3.0) as run,
        ):
            run.results()
        assert hosts.run((1, 1), rank_and_host) == [(0, "host0"), (1, "host1")]
        assert os.listdir("/sys/class/net") == links_before
        made = set(children_of(os.getpid())) - own_before
    assert made

    # The kernel ends the processes one after the other. The resource tracker stays.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(map(is_of_hosts, made)):
        time.sleep(0.01)
    assert not [process for process in made if is_of_hosts(process)]
