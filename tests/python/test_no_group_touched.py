# SPDX-License-Identifier: Apache-2.0
"""If nothing is shared, the results are those of torch, and no message is sent."""

import copy
from typing import Any

import pytest
import torch
from oracle import LAYERS, OURS
from rank_pool import RankPool
from torch import distributed

import normscope

pytestmark = pytest.mark.portable

SHAPES = {2: (6, 3), 3: (4, 3, 7), 4: (4, 3, 5, 6), 5: (2, 3, 4, 5, 6)}
SCOPES = ("world", "local", "slices:2", "group:2", "node", "ranks:0,1", "norm_batch:2")


@pytest.mark.parametrize("dim", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("keywords", [{}, {"affine": False}, {"track_running_stats": False}])
def test_eval_is_torch_to_the_bit(dim: int, dtype: torch.dtype, keywords: dict[str, Any]) -> None:
    ours = OURS[dim](3, dtype=dtype, **keywords)
    theirs = LAYERS[dim](3, dtype=dtype, **keywords)
    ours(torch.randn(SHAPES[dim], dtype=dtype) + 1)
    theirs.load_state_dict(ours.state_dict())
    scoped = [copy.deepcopy(ours) for _ in SCOPES]
    for twin, scope in zip(scoped, SCOPES, strict=True):
        twin.scope = normscope.Scope(scope)
    results = []
    for layer in (theirs, *scoped):
        torch.manual_seed(1)
        x = torch.randn(SHAPES[dim], dtype=dtype).requires_grad_()
        y = layer.eval()(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])

    for got in results[1:]:
        assert all(map(torch.equal, got, results[0]))


def eval_while_the_peer_is_away() -> int:
    """Evaluate on rank 0 only."""
    calls = normscope.training.communication_counters().calls
    if distributed.get_rank() == 0:
        for tracks in (True, False):
            layer = normscope.BatchNorm2d(3, track_running_stats=tracks).eval()
            layer(torch.randn(2, 3, 4, 4).requires_grad_()).sum().backward()
        for scope in ("local", "slices:2"):
            layer = normscope.BatchNorm2d(3, scope=scope)
            layer(torch.randn(4, 3, 4, 4)).sum().backward()
    return normscope.training.communication_counters().calls - calls


def test_eval_and_scopes_within_a_rank_do_not_wait(ranks: RankPool) -> None:
    assert ranks.run(2, eval_while_the_peer_is_away) == [0, 0]


def calls_of_a_step() -> tuple[int, torch.Tensor]:
    torch.manual_seed(0)
    layer = normscope.BatchNorm2d(3)
    before = normscope.training.communication_counters()
    y = layer(torch.randn(4, 3, 5, 5))
    y.sum().backward()
    return normscope.training.communication_counters().calls - before.calls, y.detach()


def test_a_world_of_one_sends_nothing_unless_forced(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    [(calls, y)] = ranks.run(1, calls_of_a_step)
    [(forced_calls, forced_y)] = ranks.run(
        1,
        calls_of_a_step,
        environment=environment | {"NORMSCOPE_FORCE_SYNC": "1"},
    )

    assert (calls, forced_calls) == (0, 2)
    assert torch.equal(y, forced_y)


def bytes_of_a_step() -> int:
    layer = normscope.BatchNorm2d(3)
    before = normscope.training.communication_counters()
    layer(torch.randn(2, 3, 4, 4)).sum().backward()
    after = normscope.training.communication_counters()
    assert after.seconds > before.seconds
    return after.bytes - before.bytes


@pytest.mark.own_kernels
def test_a_step_sends_eighty_bytes_per_channel_and_a_header_each_way(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    header = 4 * 8
    sent = ranks.run(2, bytes_of_a_step, environment=environment)

    assert sent == [2 * (3 * 80 + header)] * 2
