# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all Python tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pool import RankPool
from torch import distributed


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The one pool of ranks of the session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def world_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What torchrun tells its processes; a document may or may not initialize the group."""
    monkeypatch.chdir(tmp_path)  # it may write files
    # Port 0: any that is free.
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
