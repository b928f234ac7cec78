# SPDX-License-Identifier: Apache-2.0
"""The device of tests/support/torch_device.py: what the tests of other files rely on.

Every test runs on ranks, which are processes of this file alone: a process keeps the device.
"""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_device
from rank_pool import RankFailureError, RankPool
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

DEVICE = torch_device.NAME


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


def read_memory() -> None:
    torch_device.load()
    ctypes.string_at(torch.zeros(4, device=DEVICE).data_ptr(), 4)


def test_the_host_cannot_read_its_memory() -> None:
    pool = RankPool()
    try:
        with pytest.raises(RankFailureError, match="died with exit code -11"):
            pool.run(1, read_memory)
    finally:
        pool.close()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


def steps(model: nn.Module, device: str) -> dict[str, torch.Tensor]:
    """Train for two steps; return x's gradient and the state on the CPU."""
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(2):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        x = x.to(device).transpose(2, 3).requires_grad_()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert x.grad is not None
    return {"dx": x.grad.cpu(), **{name: v.cpu() for name, v in model.state_dict().items()}}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=name)


def train() -> None:
    torch_device.load()
    expected = steps(network(), "cpu")

    for index in range(torch.accelerator.device_count()):
        assert_same(steps(network(), f"{DEVICE}:{index}"), expected)


def test_batch_norm_trains_on_both_devices_with_the_numbers_of_the_cpu(pool: RankPool) -> None:
    pool.run(1, train)


def use_operations() -> None:
    torch_device.load()
    x = torch.randn(6, 4, 5)[1:].transpose(0, 2) + 3
    on = x.to(DEVICE)
    running = [torch.zeros(4), torch.ones(4)]
    on_running = [value.to(DEVICE) for value in running]

    def results(x: torch.Tensor, running: list[torch.Tensor]) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y, mean, inv_std = torch.ops.aten.native_batch_norm(
            x, None, None, *running, training=True, momentum=0.1, eps=1e-5
        )
        y.sin().sum().backward()
        var, again = torch.var_mean(x, dim=(0, 2))
        assert x.grad is not None
        return [y, mean, inv_std, x.grad, var, again, torch.cat([x, y[1:]]), *running, x[:, 1::2]]

    for got, expected in zip(results(on, on_running), results(x, running), strict=True):
        assert got.device.type == DEVICE
        assert torch.equal(got.cpu(), expected)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        nn.functional.batch_norm(on, running[0], running[1], training=True)
    out = torch.empty(0, device=DEVICE)
    torch.add(on, on, out=out)
    assert torch.equal(out.cpu(), x + x)


def test_operations_give_the_results_of_the_cpu(pool: RankPool) -> None:
    pool.run(1, use_operations)


def keep_state() -> None:
    torch_device.load()
    model = network().to(f"{DEVICE}:1")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    for got in (copy.deepcopy(model).state_dict(), loaded):
        assert all(value.device == torch.device(DEVICE, 1) for value in got.values())
        assert_same({k: v.cpu() for k, v in got.items()}, network().state_dict())

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x) * x

    x = torch.ones(100, device=DEVICE, requires_grad=True)
    y = checkpoint(dropped, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * y)  # the recomputation has dropped the same ones
    before, after = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    with torch.Stream(DEVICE) as stream:
        assert torch.accelerator.current_stream() == stream
        before.record()
        after.record()
    after.wait()
    assert before.elapsed_time(after) > 0


def test_it_keeps_state_devices_and_random_numbers(pool: RankPool) -> None:
    pool.run(1, keep_state)


def communicate(backend: str | None) -> Any:  # noqa: ANN401 - of torch
    torch_device.load()
    group = distributed.new_group(backend=backend)
    rank = distributed.get_rank()
    x = torch.full((3,), rank + 1.0, device=DEVICE)
    gathered = [torch.empty_like(x) for _ in range(2)]
    distributed.all_gather(gathered, x, group=group)
    distributed.all_reduce(x, group=group)
    assert torch.cat(gathered).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert x.tolist() == [3.0, 3.0, 3.0]
    model = nn.parallel.DistributedDataParallel(network().to(DEVICE), process_group=group)
    x = torch.full((1, 3, 8, 8), rank + 1.0, device=DEVICE)
    (model(x) * (rank + 1)).sum().backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def test_groups_whose_backend_knows_the_device_communicate_there(pool: RankPool) -> None:
    first, second = pool.run(2, communicate, torch_device.BACKENDS)

    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_other_groups_refuse_its_tensors(pool: RankPool) -> None:
    with pytest.raises(RankFailureError, match=f"No backend type associated with.* {DEVICE}"):
        pool.run(2, communicate, "gloo")
