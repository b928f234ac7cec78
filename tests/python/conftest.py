# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all Python tests."""

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The one pool of ranks of the session."""
    pool = RankPool()
    yield pool
    pool.close()
