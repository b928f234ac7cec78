# SPDX-License-Identifier: Apache-2.0
"""Layers by torch's own kernels, with which devices without kernels of normscope train."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_device
from noisy_network import trained
from oracle import OURS, arithmetic_epsilon, oracle_of, results_of
from rank_pool import KERNELS, RankFailureError, RankPool, split_of
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import normscope

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["native", "synchronized"])
def pool(request: pytest.FixtureRequest, pools: dict[str, RankPool]) -> RankPool:
    """Ranks on the CPU whose tensors torch's kernels normalize."""
    return pools[request.param]


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Tensors:
    results = results_of(layer, x, dy)
    assert results["y"].stride() == x.stride() or not x.numel()
    return {name: value.cpu().double() for name, value in results.items()}


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 2 + 10
    return x.to(dtype), torch.randn(shape, generator=generator).to(dtype)


def layer_for(shape: tuple[int, ...], scope: str, momentum: float | None) -> normscope.BatchNorm:
    layer = OURS[len(shape)](shape[1], scope=scope, momentum=momentum)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 1.5, shape[1]))
        layer.bias.copy_(torch.linspace(-1, 1, shape[1]))
    return layer


def of_oracle(
    shape: tuple[int, ...], x: torch.Tensor, dy: torch.Tensor, momentum: float | None
) -> Tensors:
    """Return the results of torch's layer in float64."""
    layer = layer_for(shape, "local", momentum)
    return step(oracle_of(layer, len(shape)), x.double(), dy.double())


def train(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    scope: str,
    dtype: torch.dtype,
    momentum: float | None,
    device: str = "cpu",
    backend: str | None = None,
) -> Tensors:
    if device == torch_device.NAME:
        torch_device.load()
    layer = layer_for(shape, scope, momentum).to(device)
    if backend is not None:
        layer.process_group = distributed.new_group(backend=backend)
    part = split_of(sizes, distributed.get_rank())
    x, dy = (t[part].to(device) for t in inputs(shape, dtype))
    return step(layer, x, dy)


def assert_trains_like_torch(
    answers: list[Tensors],
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    momentum: float | None,
) -> None:
    """Assert that ranks of one norm batch have the results of torch in float64.

    A mean of values m standard deviations from 0 is off by about m roundings of standard
    deviations; each other result has a few roundings.
    """
    x, dy = inputs(shape, dtype)
    expected = of_oracle(shape, x, dy, momentum)
    u = 64 * arithmetic_epsilon(dtype)
    kept = 64 * torch.finfo(torch.float32).eps  # parameters and buffers are float32
    for rank, got in enumerate(answers):
        part = split_of(sizes, rank)
        for name in ("y", "dx"):
            stored = torch.finfo(dtype).eps * expected[name].abs()[part]
            assert ((got[name] - expected[name][part]).abs() <= u * 4 + stored).all(), name
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(got[name], expected[name], rtol=kept, atol=kept)
    for name in ("dweight", "dbias"):
        total = torch.stack([got[name] for got in answers]).sum(0)
        torch.testing.assert_close(
            total, expected[name], rtol=kept, atol=kept * x.numel() / shape[1]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("shape", "sizes"), [((6, 3, 4, 5), (1, 0, 5)), ((8, 2), (3, 5)), ((5, 3, 7), (2, 3))]
)
def test_ranks_train_like_torch_on_the_joined_batch(
    pool: RankPool,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    momentum: float | None,
    dtype: torch.dtype,
) -> None:
    answers = pool.run(len(sizes), train, shape, sizes, "world", dtype, momentum)

    assert_trains_like_torch(answers, shape, sizes, dtype, momentum)


def without_buffers() -> torch.Tensor:
    layer = normscope.BatchNorm1d(3, track_running_stats=False)
    x, _ = inputs((4, 3), torch.bfloat16)
    y: torch.Tensor = layer(x.chunk(2)[distributed.get_rank()])
    return y.detach()


def test_bfloat16_is_normalized_without_buffers(pool: RankPool) -> None:
    y = torch.cat(pool.run(2, without_buffers))

    x, _ = inputs((4, 3), torch.bfloat16)
    torch.testing.assert_close(y, torch.nn.BatchNorm1d(3)(x.float()).bfloat16())


def train_in_parts(pool: RankPool, *where: str) -> None:
    """Assert that ranks 0 and 1, and rank 2, train like torch on their norm batches."""
    shape, sizes = (7, 3, 4), (3, 2, 2)

    answers = pool.run(3, train, shape, sizes, "ranks:0,1/2", torch.float32, 0.1, *where)

    for ranks, samples in (((0, 1), slice(0, 5)), ((2,), slice(5, 7))):
        x, dy = (t[samples].double() for t in inputs(shape, torch.float32))
        expected = of_oracle(shape, x, dy, 0.1)
        joined = torch.cat([answers[rank]["dx"] for rank in ranks])
        torch.testing.assert_close(joined, expected["dx"], rtol=1e-5, atol=1e-5)
        for rank in ranks:
            got = answers[rank]["running_var"]
            torch.testing.assert_close(got, expected["running_var"], rtol=1e-5, atol=1e-5)


def test_ranks_with_other_norm_batches_train_like_torch_on_each(pool: RankPool) -> None:
    train_in_parts(pool)


@pytest.mark.parametrize("backend", [torch_device.BACKENDS, "gloo"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_ranks_on_a_device_train_like_torch(
    devices: RankPool, backend: str, momentum: float | None
) -> None:
    shape, sizes = (6, 3, 4, 5), (1, 0, 5)
    x = torch_device.NAME

    answers = devices.run(3, train, shape, sizes, "world", torch.float32, momentum, x, backend)

    assert_trains_like_torch(answers, shape, sizes, torch.float32, momentum)


def test_parts_of_a_group_meet_on_a_device(devices: RankPool) -> None:
    train_in_parts(devices, torch_device.NAME, torch_device.BACKENDS)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuda: no device")
@pytest.mark.parametrize("kernels", ["", "torch"])  # the library's own if they are built
@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("gloo", (1, 0, 5)),
        ("nccl", (6,)),
        pytest.param("nccl", (2, 4), marks=pytest.mark.nccl),
        pytest.param("nccl", (1, 0, 5), marks=pytest.mark.nccl),
    ],
)
def test_all_kernels_train_like_torch_on_a_gpu(
    kernels: str, backend: str, sizes: tuple[int, ...]
) -> None:
    pool = RankPool(
        environment={"NORMSCOPE_DEVICE_KERNELS": kernels, "NORMSCOPE_FORCE_SYNC": "1"},
        # One rank makes its group over NCCL from one over Gloo.
        backend=backend if len(sizes) > 1 else "gloo",
    )
    shape = (6, 3, 4, 5)

    answers = pool.run(
        len(sizes), train, shape, sizes, "world", torch.float32, 0.1, "cuda", backend
    )

    if len(sizes) == 3:
        train_in_parts(pool, "cuda", backend)
    pool.close()
    assert_trains_like_torch(answers, shape, sizes, torch.float32, 0.1)


def whole_network(device: str, backend: str) -> Tensors:
    """Train with a mask, slices, accumulation, checkpoints and copies on the device."""
    torch_device.load()
    rank = distributed.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 4, 1),
        torch.nn.BatchNorm2d(4),
        torch.nn.SiLU(),
    )
    group = distributed.new_group(backend=backend)
    net = normscope.convert(net, scope="world", process_group=group, fuse=True).to(device)
    last: Any = net[-2]
    last.scope = "slices:2"
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(rank)).to(device)
    with normscope.accumulate(net):
        for part in x.split(4):
            y = checkpoint(net, part, use_reentrant=False, context_fn=normscope.checkpoint_context)
            y.square().mean().backward()
    mask = torch.arange(8, device=device).view(8, 1, 1, 1) < 5
    net[1](net[0](x), mask=mask.expand(8, 1, 4, 4)).sum().backward()
    (g,) = torch.autograd.grad(net(x.requires_grad_()).square().mean(), x, create_graph=True)
    g.square().sum().backward()
    normscope.sync_running_stats(net)
    results = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: v.cpu().double() for name, v in [*results.items(), *net.named_buffers()]}


@pytest.mark.parametrize("backend", [torch_device.BACKENDS, "gloo"])
def test_what_works_on_the_cpu_works_on_a_device(devices: RankPool, backend: str) -> None:
    on_device = devices.run(2, whole_network, torch_device.NAME, backend)
    on_cpu = devices.run(2, whole_network, "cpu", "gloo")

    for got, expected in zip(on_device, on_cpu, strict=True):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4, msg=name)


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


def meet(*, on_device: tuple[bool, ...]) -> None:
    torch_device.load()
    device = torch_device.NAME if on_device[distributed.get_rank()] else "cpu"
    normscope.BatchNorm1d(3).to(device)(torch.randn(4, 3).to(device))


def cpu_meets_device() -> None:
    meet(on_device=(True, False))


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
        mean = torch.empty(3, device="cuda")
        wanted = (True, True, True)
        dx, *_ = torch.ops.normscope.portable_backward(
            y, x, None, mean, *wanted, "world", "", "",
            spread=mean, counts=mean, eps=1e-5,
        )  # fmt: skip
        assert (dx.shape, dx.device.type) == (x.shape, "cuda")


# In other scopes torch's own layer runs, which needs CUDA even for fake tensors.
@pytest.mark.parametrize("scope", ["world", "group:2"])
def test_fake_tensors_of_cuda_pass(devices: RankPool, scope: str) -> None:
    devices.run(2, fake_step, scope)


def normalize(x: torch.Tensor, mask: torch.Tensor | None, settings: dict[str, Any]) -> torch.Tensor:
    layer = normscope.BatchNorm2d(x.shape[1], scope="slices:2", **settings)
    y: torch.Tensor = layer(x, mask=mask)
    return y.detach()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"track_running_stats": False},
        {"slice_stats": "pooled"},
        {"slice_stats": "first"},
        {"slice_stats": "sequential"},
    ],
)
def test_statistics_of_every_slice_are_as_wide_as_float32(
    pools: dict[str, RankPool],
    dtype: torch.dtype,
    settings: dict[str, Any],
    *,
    affine: bool,
    masked: bool,
) -> None:
    mean = 10
    x = (torch.randn(8, 3, 16, 16) + mean).to(dtype)
    mask = torch.ones_like(x[:, :1], dtype=torch.bool) if masked else None

    [y] = pools["native"].run(1, normalize, x, mask, {"affine": affine, **settings})

    slices = x.double().chunk(2)
    expected = torch.cat([(s - s.mean((0, 2, 3), keepdim=True)) for s in slices])
    expected /= torch.cat(
        [s.var((0, 2, 3), correction=0, keepdim=True).add(1e-5).sqrt().expand_as(s) for s in slices]
    )
    # The mean has the roundings of one that is `mean` standard deviations from 0.
    of_statistics = 64 * mean * arithmetic_epsilon(dtype)
    stored = torch.finfo(dtype).eps * expected.abs()
    assert ((y.double() - expected).abs() <= of_statistics + stored).all()


def recompute(momentum: float | None) -> tuple[list[Any], list[Any]]:
    """Return the buffers after a forward of a batch with infinity, and after its backward."""
    layer = normscope.BatchNorm1d(3, scope="local", momentum=momentum)
    x = torch.randn(4, 3)
    x[0, 0] = float("inf")
    y = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    before = [buffer.tolist() for buffer in layer.buffers()]
    y.sum().backward()
    return before, [buffer.tolist() for buffer in layer.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_recomputation_leaves_infinite_running_statistics(
    pools: dict[str, RankPool], momentum: float | None
) -> None:
    [(before, after)] = pools["native"].run(1, recompute, momentum)

    assert before[0][0] == float("inf")
    assert str(after) == str(before)  # NaN differs from itself


def compiled(scope: str, backend: str | None) -> Tensors:
    torch.manual_seed(0)
    layer = layer_for((4, 3, 5, 5), scope, 0.1)
    x, dy = inputs((4, 3, 5, 5), torch.float32)
    block = torch.nn.Sequential(layer, torch.nn.ReLU())
    torch.compiler.reset()
    return step(torch.compile(block, backend="aot_eager", fullgraph=True), x, dy)  # type: ignore[arg-type]


@pytest.mark.parametrize("scope", ["local", "slices:2", "world"])
def test_compiled_layers_train_like_eager_ones(pool: RankPool, scope: str) -> None:
    answers = pool.run(2, compiled, scope, None)

    layer = torch.nn.Sequential(layer_for((4, 3, 5, 5), scope, 0.1), torch.nn.ReLU())
    x, dy = inputs((4, 3, 5, 5), torch.float32)
    expected = step(layer, x, dy)
    for got in answers:
        for name in ("y", "dx"):
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)


def test_the_command_names_the_kernels_of_each_device() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "normscope"],
        env={**os.environ, **KERNELS["native"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch's native_batch_norm, because of NORMSCOPE_DEVICE_KERNELS=torch" in run.stdout


def refuse(value: str) -> Any:  # noqa: ANN401
    os.environ["NORMSCOPE_DEVICE_KERNELS"] = value
    normscope.BatchNorm1d(3)(torch.randn(4, 3))


def test_another_value_of_the_variable_is_refused() -> None:
    pool = RankPool()
    with pytest.raises(
        RankFailureError, match='NORMSCOPE_DEVICE_KERNELS: expected torch or nothing, got "x"'
    ):
        pool.run(1, refuse, "x")
    pool.close()
