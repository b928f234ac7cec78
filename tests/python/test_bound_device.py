# SPDX-License-Identifier: Apache-2.0
"""Groups of ``init_process_group("nccl", device_id=...)``, from which torch splits new groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nccl_on_host import DEVICE, LIMIT, NcclOnHost, bind_device, default_group, nccl_on_host
from rank_pool import RankPool
from torch import distributed

import normscope

OVER_BACKEND = {"NORMSCOPE_SHARED_MEMORY": "0", "NORMSCOPE_TIMEOUT": "20"}


def statistics_of_some_ranks(store: Path, scope: str, members: list[int] | None) -> list[float]:
    """Train one step on the members only, by a group of them if they are not the world."""
    with nccl_on_host(store):
        rank = distributed.get_rank()
        group = None if members is None else distributed.new_group(members, timeout=LIMIT)
        bind_device()
        if members is not None and rank not in members:
            return []
        layer = normscope.BatchNorm2d(1, scope=scope, process_group=group, momentum=1.0)
        layer(torch.full((2, 1, 2, 2), float(rank)))
        assert default_group().bound_device_id == DEVICE  # for the program's next groups
        assert layer.running_mean is not None
        return layer.running_mean.tolist()


@pytest.mark.parametrize(
    ("scope", "members", "means"),
    [
        ("world", [0, 2], [[1.0], [], [1.0]]),
        ("world", None, [[1.0], [1.0], [1.0]]),
        ("group:2", None, [[0.5], [0.5], [2.0]]),
        ("ranks:0,2/1", None, [[1.0], [1.0], [1.0]]),
    ],
)
def test_only_the_ranks_that_share_statistics_make_a_group(
    ranks: RankPool, tmp_path: Path, scope: str, members: list[int] | None, means: list[list[float]]
) -> None:
    got = ranks.run(
        3,
        statistics_of_some_ranks,
        tmp_path / "store",
        scope,
        members,
        environment=OVER_BACKEND,
    )

    assert got == means


def channels_of_groups(store: Path) -> list[int]:
    with nccl_on_host(store):
        bind_device()
        normscope.BatchNorm2d(1)(torch.randn(2, 1, 2, 2))
        return [backend.given.config.max_ctas for backend in NcclOnHost.made]


def test_a_group_for_messages_has_few_channels(ranks: RankPool, tmp_path: Path) -> None:
    for channels in ranks.run(2, channels_of_groups, tmp_path / "store", environment=OVER_BACKEND):
        assert channels == [32, 4]
