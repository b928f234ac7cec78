# SPDX-License-Identifier: Apache-2.0
"""The ranks of tests: what one run leaves behind does not reach the next."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rank_pool import RankFailureError, RankPool
from torch import distributed


def process_and_sum() -> tuple[int, float]:
    ones = torch.ones(1)
    distributed.all_reduce(ones)
    return os.getpid(), ones.item()


def fails_to_make_a_group(store: Path) -> None:
    """Let rank 1 wait for a peer that does not come."""
    if distributed.get_rank() == 0:
        return
    distributed.destroy_process_group()
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=1,
        world_size=2,
        timeout=timedelta(seconds=0.2),
    )


def test_processes_live_until_a_run_fails(tmp_path: Path) -> None:
    pool = RankPool()
    try:
        first, second = (pool.run(2, process_and_sum) for _ in range(2))
        with pytest.raises(RankFailureError, match="rank 1: "):
            pool.run(2, fails_to_make_a_group, tmp_path / "store")
        third = pool.run(2, process_and_sum, group_seconds=10.0)
    finally:
        pool.close()

    assert first == second
    assert [total for _, total in third] == [2.0, 2.0]
    assert {process for process, _ in third}.isdisjoint(process for process, _ in first)
