# SPDX-License-Identifier: Apache-2.0
"""The pool of ranks itself: failures are reported, and the next run works."""

import os
import time

import pytest
from rank_pool import RankFailureError, RankPool
from torch import distributed


def rank_and_size() -> tuple[int, int]:
    return distributed.get_rank(), distributed.get_world_size()


def raise_on_rank_1() -> None:
    if distributed.get_rank() == 1:
        raise ValueError("what rank 1 found")


def die() -> None:
    os._exit(7)


def hang_on_rank_0() -> None:
    if distributed.get_rank() == 0:
        time.sleep(60)


def test_a_run_has_the_requested_ranks_and_reports_failures() -> None:
    pool = RankPool()
    try:
        assert pool.run(2, rank_and_size) == [(0, 2), (1, 2)]
        assert pool.run(1, rank_and_size) == [(0, 1)]

        with pytest.raises(RankFailureError, match=r"(?s)rank 1: .*what rank 1 found"):
            pool.run(2, raise_on_rank_1)
        with pytest.raises(RankFailureError, match=r"ranks \[0\] of 2 hung"):
            pool.run(2, hang_on_rank_0, hang_seconds=5)
        with pytest.raises(RankFailureError, match="rank 0 of 1 died with exit code 7"):
            pool.run(1, die)

        assert pool.run(1, rank_and_size) == [(0, 1)]
    finally:
        pool.close()
