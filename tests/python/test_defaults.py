# SPDX-License-Identifier: Apache-2.0
"""The default device and dtype of a program affect nothing that normscope computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import distributed, nn

import normscope
from normscope.costs import measure

Results = dict[str, Any]


class Given:
    """Everything that a rank needs tensors for, made before the defaults change."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(distributed.get_rank())
        self.batches = list(torch.randn(5, 4, 3, 6, generator=generator))
        self.mask = torch.rand(4, 1, 6, generator=generator) < 0.7
        self.model: Any = nn.Sequential(
            nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1)
        )
        self.model.append(normscope.BatchNormAct1d(4, activation="silu"))
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) + number)
        self.loss = torch.ones(())

    def step(self, run: Callable[[torch.Tensor], torch.Tensor]) -> Results:
        """Return the gradients and buffers of a training step."""
        x = self.batches[0].requires_grad_()
        run(x).square().sum().backward(self.loss)
        results = {name: p.grad for name, p in self.model.named_parameters()}
        return {**results, "dx": x.grad, **self.buffers()}

    def buffers(self) -> Results:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}


def fused(given: Given) -> Results:
    normscope.convert(given.model, "norm_batch:8", fuse=True)
    return given.step(given.model)


def joined(given: Given) -> Results:
    own = given.batches[: 2 + distributed.get_rank()]
    steps = list(normscope.joined(own))
    return {"weights": [w for _, w in steps], "last": steps[-1][0]}


def synchronized(given: Given) -> Results:
    normscope.convert(given.model, "local")(given.batches[0])
    normscope.sync_running_stats(given.model)
    return given.buffers()


def estimated(given: Given) -> Results:
    normscope.convert(given.model, "world")
    normscope.estimate_running_stats(given.model, given.batches)
    return given.buffers()


def recommended(given: Given) -> Results:
    normscope.convert(given.model, "local")
    plan = normscope.recommend_scopes(given.model, given.batches, 1000)
    return {name: str(scope) for name, scope in plan.scopes.items()} | given.buffers()


def scheduled(given: Given) -> Results:
    normscope.convert(given.model, "local")
    schedule = normscope.ProgressiveScope(given.model, ["local", "norm_batch:8"], [0, 1])
    schedule.step()
    return given.step(given.model)


def measured(given: Given) -> Results:
    return {"parameters": sorted(measure(sizes=(1 << 10, 1 << 12), rounds=1).deviations)}


def copied(given: Given) -> Results:
    normscope.convert(given.model, "world")
    copied = copy.deepcopy(given.model)
    given.model = normscope.to_torch(copied).eval()
    return {"y": given.model(given.batches[0]).detach()}


# Other steps are among the drawn programs of test_programs.py.
CALLS: dict[str, Callable[[Given], Results]] = {
    "fused": fused,
    "joined": joined,
    "synchronized": synchronized,
    "estimated": estimated,
    "recommended": recommended,
    "scheduled": scheduled,
    "measured": measured,
    "copied": copied,
}

# Another device and dtype than those of the tensors; meta stands for any device.
DEFAULTS = [("meta", torch.float64), ("meta", torch.bfloat16)]


def results_of(name: str, device: str, dtype: torch.dtype) -> Results:
    torch.manual_seed(0)
    given = Given()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        return CALLS[name](given)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:the standard error exceeds")
@pytest.mark.parametrize("name", CALLS)
def test_the_defaults_of_a_program_change_nothing(ranks: RankPool, name: str) -> None:
    expected = ranks.run(2, results_of, name, "cpu", torch.float32)

    for device, dtype in DEFAULTS:
        for got, of_rank in zip(
            ranks.run(2, results_of, name, device, dtype), expected, strict=True
        ):
            assert got.keys() == of_rank.keys()
            for key, value in of_rank.items():
                equal = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
                assert equal(got[key], value), key
