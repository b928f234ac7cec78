# SPDX-License-Identifier: Apache-2.0
"""The ranks of tests: what one run leaves behind does not reach the next."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from rank_pool import HANG_SECONDS, RankFailureError, RankPool
from torch import distributed
from torch._C import _distributed_c10d as c10d


def process_and_sum() -> tuple[int, float]:
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    return os.getpid(), ones.item()


def fails_to_make_a_group() -> None:
    """Let rank 1 wait for a peer that does not come."""
    if distributed.get_rank() == 0:
        return
    distributed.destroy_process_group()
    distributed.init_process_group(
        "gloo", store=c10d.HashStore(), rank=1, world_size=2, timeout=timedelta(seconds=0.2)
    )


def dies() -> None:
    if distributed.get_rank() == 1:
        os._exit(3)


def hangs() -> None:
    if distributed.get_rank() == 1:
        time.sleep(HANG_SECONDS)


@pytest.mark.parametrize(
    ("fails", "text"),
    [
        (fails_to_make_a_group, "rank 1: Traceback"),
        (dies, "rank 1 of 2 died with exit code 3"),
        (hangs, r"ranks \[1\] of 2 hung"),
    ],
)
def test_processes_live_until_a_run_fails(fails: Callable[[], None], text: str) -> None:
    with contextlib.closing(RankPool()) as pool:
        first, second = (pool.run(2, process_and_sum) for _ in range(2))
        with pytest.raises(RankFailureError, match=text):
            pool.run(2, fails, hang_seconds=10.0)
        third = pool.run(2, process_and_sum, group_seconds=10.0)

    assert first == second
    assert [total for _, total in third] == [2.0, 2.0]
    assert {process for process, _ in third}.isdisjoint(process for process, _ in first)
