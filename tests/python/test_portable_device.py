# SPDX-License-Identifier: Apache-2.0
"""What torch's kernels do on a device whose memory the host cannot access."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_device
from noisy_network import trained
from rank_pool import RankFailureError, RankPool, error_of
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import normscope

Tensors = dict[str, torch.Tensor]


def activated_step(device: str, mode: str) -> list[torch.Tensor]:
    torch_device.load()
    layer: Any = normscope.BatchNormAct1d(3, activation="silu").to(device)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    x = torch.randn(4, 3, generator=generator).to(device).requires_grad_()
    with normscope.training.exact_graphs():
        run: Any = torch.compile(layer, backend="aot_eager") if mode == "compiled" else layer
        y = run(x)
        torch.autograd.backward(y.square().sum())
    assert x.grad is not None
    return [t.detach().cpu() for t in (y, x.grad, layer.weight.grad, *layer.buffers())]


def test_exact_graphs_with_activations_have_the_results_of_eager_mode(devices: RankPool) -> None:
    compiled = devices.run(2, activated_step, torch_device.NAME, "compiled")
    eager = devices.run(2, activated_step, torch_device.NAME, "eager")

    for got, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, expected)


def read_memory() -> None:
    torch_device.load()
    ctypes.string_at(torch.zeros(4, device=torch_device.NAME).data_ptr(), 4)


def mix_devices() -> None:
    torch_device.load()
    x = torch.randn(4, 3, device=torch_device.NAME)
    torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)


def sum_over_gloo() -> None:
    torch_device.load()
    group = distributed.new_group(backend="gloo")
    distributed.all_reduce(torch.zeros(3, device=torch_device.NAME), group=group)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (read_memory, "died with exit code -11"),
        (mix_devices, "Expected all tensors to be on the same device"),
        (sum_over_gloo, f"No backend type associated with.* {torch_device.NAME}"),
    ],
)
def test_the_device_of_tests_is_apart_from_the_host(
    devices: RankPool, call: Callable[[], None], message: str
) -> None:
    with pytest.raises(RankFailureError, match=message):
        devices.run(2, call)


def cpu_meets_device() -> None:
    torch_device.load()
    device = ("cpu", torch_device.NAME)[distributed.get_rank()]
    normscope.BatchNorm1d(3).to(device)(torch.randn(4, 3).to(device))


def measured(device: str, backend: str) -> tuple[list[float], int, list[torch.Tensor]]:
    """Return the noise of a plan, the number of joined batches and estimated running statistics."""
    torch_device.load()
    rank = distributed.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    group = distributed.new_group(backend=backend)
    net = normscope.convert(net, scope="world", process_group=group).to(device)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 3, 8, 8, generator=generator).to(device) for _ in range(32)]
    plan = normscope.recommend_scopes(trained(net), batches, 0.02)
    noise = [candidate.noise for layer in plan.layers for candidate in layer.candidates]
    normscope.estimate_running_stats(net, batches)
    joined = sum(1 for _ in normscope.joined(batches[: 3 + rank]))
    return noise, joined, [b.cpu() for b in net.buffers()]


@pytest.mark.parametrize("backend", [torch_device.BACKENDS, "gloo"])
def test_measurements_on_a_device_are_those_of_the_cpu(devices: RankPool, backend: str) -> None:
    on_device = devices.run(2, measured, torch_device.NAME, backend)
    on_cpu = devices.run(2, measured, "cpu", "gloo")

    for got, expected in zip(on_device, on_cpu, strict=True):
        assert got[0] == pytest.approx(expected[0], rel=1e-4)
        assert got[1] == expected[1]
        torch.testing.assert_close(got[2], expected[2], rtol=1e-5, atol=1e-5)


def pooled_mean(device: str) -> tuple[int | None, float]:
    """Return the elements of this rank, and the mean of pairs of ranks that see 0 and 1, pooled."""
    torch_device.load()
    rank = distributed.get_rank()
    layer = normscope.BatchNorm1d(1, scope="group:2", momentum=1.0).to(device)
    layer(torch.full(((2, 2, 2, 10)[rank], 1), float(rank // 2)).to(device))
    seen = layer.elements_seen
    normscope.sync_running_stats(layer)
    return seen, layer.get_buffer("running_mean").item()


def test_ranks_on_a_device_are_weighted_by_their_elements(devices: RankPool) -> None:
    expected = [(elements, 0.75) for elements in (2, 2, 2, 10)]
    assert devices.run(4, pooled_mean, torch_device.NAME) == expected


def random_numbers_after_measuring() -> bool:
    torch_device.load()
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    net = normscope.convert(net, scope="world").to(torch_device.NAME)
    batches = [torch.randn(4, 3).to(torch_device.NAME) for _ in range(2)]
    before = torch.get_device_module(torch_device.NAME).get_rng_state(0)
    normscope.recommend_scopes(net, batches)
    after = torch.get_device_module(torch_device.NAME).get_rng_state(0)
    return bool(torch.equal(before, after))


def test_measuring_leaves_the_random_numbers_of_the_device(devices: RankPool) -> None:
    assert devices.run(1, random_numbers_after_measuring) == [True]


@pytest.mark.own_kernels
def test_a_rank_on_the_cpu_and_one_on_a_device_are_told_so(devices: RankPool) -> None:
    with pytest.raises(RankFailureError, match="kernels of torch") as failure:
        devices.run(2, cpu_meets_device)
    assert "rank 0: Traceback" in str(failure.value)
    assert "rank 1: Traceback" in str(failure.value)


VIEWS = [
    *("chunk", "contiguous", "detach", "empty", "empty_like", "narrow", "reshape", "select"),
    *("split", "squeeze", "t", "view"),
]


def operations_of(call: Callable[[], object]) -> list[str]:
    """Return the operations of torch in a call, without views and what Gloo's threads do."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    events = profiler.events() or []
    of_gloo = {event.thread for event in events if event.name.startswith("gloo:")}
    found = []
    for event in events:
        if event.thread in of_gloo:
            continue
        _, is_operation, name = event.name.partition("aten::")
        parent = event.cpu_parent
        while parent is not None and not parent.name.startswith("aten::"):
            parent = parent.cpu_parent
        if is_operation and parent is None and name not in VIEWS:
            found.append(name)
    return found


def operations(layer_class: type[torch.nn.Module]) -> tuple[list[str], list[str]]:
    """Return the operations in a forward and in a backward of a layer of two ranks."""
    torch_device.load()
    import synchronized_kernels

    kernels = synchronized_kernels.register("PrivateUse1")
    group = distributed.new_group(backend=torch_device.BACKENDS)
    layer = layer_class(3, process_group=group).to(torch_device.NAME)
    x = torch.randn(2, 3, 4, 4).to(torch_device.NAME).requires_grad_()
    layer(x).sum().backward()
    layer.zero_grad()
    x.grad = None
    y = layer(x)
    dy = torch.ones_like(y)
    found = operations_of(lambda: layer(x)), operations_of(lambda: y.backward(dy))
    del kernels
    return found


def test_a_step_takes_few_operations_and_none_that_waits(devices: RankPool) -> None:
    for forward, backward in devices.run(2, operations, normscope.BatchNorm2d):
        assert forward == [
            "batch_norm_stats",
            "cat",  # before the collective
            "copy_",  # the headers as integers
            "copy_",  # and to the host, for a later check
            "batch_norm_gather_stats_with_counts",
            "batch_norm_elemt",
            "add_",  # num_batches_tracked
        ]
        assert backward == ["batch_norm_backward_reduce", "cat", "batch_norm_backward_elemt"]


def test_the_operations_of_torch_s_synchronized_layer_are_those_in_the_documents(
    devices: RankPool,
) -> None:
    for forward, backward in devices.run(2, operations, torch.nn.SyncBatchNorm):
        assert len(forward) == 11
        assert forward.count("index") == 3  # by a mask, which waits for the device
        assert len(backward) == 3


def fake_step(scope: str) -> None:
    with FakeTensorMode():
        layer = normscope.BatchNorm2d(3, scope=scope)
        places: tuple[Any, ...] = (layer._parameters, layer._buffers)
        for tensors in places:  # to() needs CUDA itself
            for name, value in tensors.items():
                assert value is not None
                other = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                parameter = isinstance(value, torch.nn.Parameter)
                tensors[name] = torch.nn.Parameter(other) if parameter else other
        x = torch.empty(4, 3, 5, 5, device="cuda")
        with torch.no_grad():  # torch without CUDA makes no nodes for such tensors
            y = layer(x)
        assert (y.shape, y.device.type) == (x.shape, "cuda")
        statistics = torch.empty(1, 3, 3, device="cuda", dtype=torch.float64)
        wanted = (True, True, True)
        dx, *_ = torch.ops.normscope.batch_norm_backward(
            y, x, None, statistics, *wanted, "world", "", ""
        )
        assert (dx.shape, dx.device.type) == (x.shape, "cuda")


# In other scopes torch's own layer runs, which needs CUDA even for fake tensors.
@pytest.mark.parametrize("scope", ["world", "group:2"])
def test_fake_tensors_of_cuda_pass(devices: RankPool, scope: str) -> None:
    devices.run(2, fake_step, scope)


def later_refusal(compiled: bool) -> tuple[str, Tensors]:  # noqa: FBT001
    """Return the error of the call after one of a single value, and the state after both."""
    torch_device.load()
    layer = normscope.BatchNorm1d(3, scope="group:2").to(torch_device.NAME)
    layer.process_group = distributed.new_group(backend=torch_device.BACKENDS)
    call: Any = torch.compile(layer, backend="aot_eager", dynamic=True) if compiled else layer
    x = torch.randn((1, 0, 4)[distributed.get_rank()], 3).to(torch_device.NAME)
    call(x)
    error = error_of(lambda: call(x), ValueError)
    torch.compiler.reset()
    return error, {name: value.cpu() for name, value in layer.state_dict().items()}


@pytest.mark.parametrize("compiled", [False, True])
def test_one_value_per_channel_is_refused_by_the_next_call(
    devices: RankPool, *, compiled: bool
) -> None:
    fresh = normscope.BatchNorm1d(3).state_dict()

    for error, state in devices.run(3, later_refusal, compiled)[:2]:
        assert "more than 1 value per channel" in error
        assert "got 1 in an earlier call, forward of" in error
        assert all(torch.equal(state[name], fresh[name]) for name in fresh if "running" in name)
