# SPDX-License-Identifier: Apache-2.0
"""Layers on a GPU: the same bits as on the CPU, torch's streams and graphs, and no waiting.

With NORMSCOPE_TEST_DEVICE=cpu, and a library that treats CPU tensors as device tensors, all tests
run except those that need a real GPU.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from replicas import replicas_of, run_replicas
from torch import distributed

import normscope
from normscope._binding import ops

DEVICE = os.environ.get("NORMSCOPE_TEST_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available() and ops.installation([]).cuda == "built"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="cuda: no device, or not built"),
]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="cuda: no device, or not built")

FORCED = {"NORMSCOPE_FORCE_SYNC": "1"}
SHAPES = [(4, 5, 7, 7), (3, 64, 33, 33), (2, 16, 129, 129), (6, 37, 1, 1), (0, 5, 4, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[RankPool]:
    """Ranks over NCCL, one for each GPU."""
    pool = RankPool(backend="nccl")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def peer_ranks() -> Iterator[RankPool]:
    """Ranks that share a GPU, and exchange messages in its memory."""
    pool = RankPool({"NORMSCOPE_PEER_MEMORY": "1"})
    yield pool
    pool.close()


NCCL = pytest.param("nccl_ranks", marks=pytest.mark.nccl)


@pytest.fixture(params=["ranks", "peer_ranks", NCCL])
def device_ranks(request: pytest.FixtureRequest) -> RankPool:
    """Ranks with tensors of a device: all on one, over Gloo or in its memory; and over NCCL."""
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


@pytest.fixture(params=["peer_ranks", NCCL])
def graph_ranks(request: pytest.FixtureRequest) -> RankPool:
    """Those whose exchanges can be captured."""
    pool: RankPool = request.getfixturevalue(request.param)
    return pool


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x with a nonzero mean, and dy, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 3 + 7
    dy = torch.randn(shape, generator=generator)
    return x.to(dtype, memory_format=layout), dy.to(dtype, memory_format=layout)


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Tensors:
    """Run a forward and a backward on the layer's device; return all results on the CPU."""
    device = next(layer.parameters()).device
    x = x.to(device).detach().requires_grad_()
    y = layer(x)
    y.backward(dy.to(device))
    assert x.grad is not None
    assert x.numel() == 0 or y.stride() == x.stride() == x.grad.stride()
    gradients = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    out = {"y": y, "dx": x.grad, **gradients, **dict(layer.named_buffers())}
    # Empty tensors have to be copied too.
    return {name: value.detach().cpu().clone() for name, value in out.items()}


def same_bits(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_bits_of_the_cpu(
    shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    on_cpu = normscope.BatchNorm2d(shape[1], scope="local")
    on_device = copy.deepcopy(on_cpu).to(DEVICE)

    for seed in range(2):
        x, dy = inputs(shape, dtype, layout, seed)

        assert same_bits(step(on_device, x, dy), step(on_cpu, x, dy))


def joined(sizes: list[int], layout: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs((sum(sizes), 6, 9, 9), torch.float32, layout, seed=0)


def part_of_a_rank(
    sizes: list[int], layout: torch.memory_format, group: distributed.ProcessGroup | None = None
) -> Tensors:
    """Run this rank's samples of the joined batch twice; return the second results."""
    torch.manual_seed(0)
    layer = normscope.BatchNorm2d(6, process_group=group).to(DEVICE)
    rank = distributed.get_rank()
    x, dy = (whole.split(sizes)[rank] for whole in joined(sizes, layout))
    step(layer, x, dy)
    layer.zero_grad()
    return step(layer, x, dy)


@pytest.mark.parametrize("sizes", [[3, 2], [2, 0, 1, 4]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_get_the_bits_of_one_cpu_with_the_joined_batch(
    device_ranks: RankPool, sizes: list[int], layout: torch.memory_format
) -> None:
    alone = normscope.BatchNorm2d(6, scope="local")
    x, dy = joined(sizes, layout)
    step(alone, x, dy)
    alone.zero_grad()
    expected = step(alone, x, dy)

    parts = device_ranks.run(len(sizes), part_of_a_rank, sizes, layout)

    for name in ("y", "dx"):
        assert torch.equal(torch.cat([part[name] for part in parts]), expected[name])
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert all(torch.equal(part[name], expected[name]) for part in parts)


def different_layers() -> str:
    net = torch.nn.ModuleDict({"a": torch.nn.BatchNorm2d(3), "b": torch.nn.BatchNorm2d(3)})
    net = normscope.convert(net, "world").to(DEVICE)
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    for name in ("a", "b"):
        net[name](x)  # from now on the group knows the layer
    y = net["a" if distributed.get_rank() == 0 else "b"](x)
    assert bool(y.isnan().all())
    with pytest.raises(RuntimeError, match=r"forward of [ab] .*NORMSCOPE_CHECK=1"):
        net["a"](x)
    return "raised"


def test_ranks_in_different_layers_get_nan_and_the_next_call_raises(
    device_ranks: RankPool,
) -> None:
    assert device_ranks.run(2, different_layers) == ["raised", "raised"]


def mean_of_members(scope: str, members: list[int] | None) -> list[float]:
    """Return the mean of this rank's norm batch, to which each rank gives its number."""
    rank = distributed.get_rank()
    group = None if members is None else distributed.new_group(members)
    means: list[float] = []
    if members is None or rank in members:
        layer = normscope.BatchNorm2d(1, scope=scope, process_group=group, momentum=1.0).to(DEVICE)
        for _ in range(2):
            layer(torch.full((2, 1, 2, 2), float(rank), device=DEVICE))
        assert layer.running_mean is not None
        means = layer.running_mean.tolist()
    distributed.barrier()  # none destroys its groups while others make theirs
    return means


@pytest.mark.parametrize(
    ("scope", "members", "means"),
    [
        ("ranks:0,1/2", None, [[0.5], [0.5], [2.0]]),
        ("group:2", None, [[0.5], [0.5], [2.0]]),
        ("world", [0, 1], [[0.5], [0.5], []]),
    ],
)
def test_some_ranks_share_statistics(
    device_ranks: RankPool, scope: str, members: list[int] | None, means: list[list[float]]
) -> None:
    assert device_ranks.run(3, mean_of_members, scope, members) == means


def step_of_replicas(layer: torch.nn.Module, x: torch.Tensor) -> Tensors:
    """Run the first step of two replicas on one device, in threads."""
    leaf = x.detach().requires_grad_()
    y = torch.cat(run_replicas(replicas_of(layer, 2), leaf.split([2, len(x) - 2])))
    y.sin().sum().backward()
    assert leaf.grad is not None
    out = {"y": y, "dx": leaf.grad, **dict(layer.named_buffers())}
    return {name: value.detach().cpu() for name, value in out.items()}


def test_replicas_share_statistics_as_on_the_cpu() -> None:
    on_cpu = normscope.BatchNorm2d(3)
    on_device = copy.deepcopy(on_cpu).to(DEVICE)
    x = torch.randn(5, 3, 6, 6)

    found, expected = step_of_replicas(on_device, x.to(DEVICE)), step_of_replicas(on_cpu, x)

    for name, value in expected.items():
        # torch computes the loss on each device in its own way.
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="cuda: two devices are needed")
def test_data_parallel_trains_as_one_device() -> None:
    layer = normscope.BatchNorm2d(3).to(DEVICE)
    alone = copy.deepcopy(layer)
    x = torch.randn(5, 3, 6, 6, device=DEVICE)

    assert torch.equal(torch.nn.DataParallel(layer)(x), alone(x))
    assert all(map(torch.equal, layer.buffers(), alone.buffers()))


@needs_gpu
def test_tensors_of_two_devices_are_refused() -> None:
    layer = normscope.BatchNorm2d(3, scope="local")

    with pytest.raises(RuntimeError, match="expected the device of x"):
        layer(torch.randn(2, 3, 4, 4, device=DEVICE))


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("momentum", [0.1, None])
def test_nothing_waits_for_the_device(momentum: float | None) -> None:
    layer = normscope.BatchNorm2d(5, scope="local", momentum=momentum).to(DEVICE)
    x = torch.randn(4, 5, 9, 9, device=DEVICE, requires_grad=True)
    layer(x).sum().backward()

    with waiting_is_an_error():
        layer(x).sum().backward()


@needs_gpu
def test_work_goes_to_the_current_stream() -> None:
    layer = normscope.BatchNorm2d(16, scope="local").to(DEVICE)
    x, dy = inputs((8, 16, 65, 65), torch.float32, torch.contiguous_format, seed=0)
    expected = step(copy.deepcopy(layer), x, dy)

    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)  # work on another stream would run too early
        found = step(layer, x, dy)

    assert same_bits(found, expected)


@needs_gpu
def test_what_a_layer_keeps_is_not_memory_of_a_pool_of_torch() -> None:
    layer = normscope.BatchNorm2d(16, scope="local").to(DEVICE)
    x, dy = inputs((8, 16, 9, 9), torch.float32, torch.contiguous_format, seed=0)
    first = copy.deepcopy(layer)

    with torch.cuda.stream(torch.cuda.Stream()):  # a new stream, which has kept nothing yet
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            expected = step(first, x, dy)
        with torch.cuda.use_mem_pool(pool):
            ones = [torch.ones(1 << 16, device=DEVICE) for _ in range(64)]
        assert same_bits(step(layer, x, dy), expected)
    assert ones


@needs_gpu
def test_graphs_of_torch_compile_give_the_bits_of_eager_calls() -> None:
    layer = normscope.BatchNorm2d(16, scope="local").to(DEVICE)
    compiled = copy.deepcopy(layer)
    compiled.compile(mode="reduce-overhead")

    for seed in range(5):  # a warm-up, a capture, replays
        x, dy = inputs((8, 16, 9, 9), torch.float32, torch.contiguous_format, seed)
        found, expected = step(compiled, x, dy), step(layer, x, dy)
        torch.testing.assert_close(list(found.values()), list(expected.values()))
        compiled.zero_grad()  # gradients are memory of the graph, which its next run overwrites
        layer.zero_grad()


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture the launches of `call` in a graph; return the graph and the result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = call()
    return graph, answer


def replay_as_eager(samples: int, momentum: float | None, scope: str) -> None:
    """Compare three replays with new inputs to a layer that runs them eagerly."""
    layer = normscope.BatchNorm2d(5, scope=scope, momentum=momentum).to(DEVICE)
    eager = copy.deepcopy(layer)
    x = torch.zeros(samples, 5, 9, 9, device=DEVICE, requires_grad=True)
    dy = torch.zeros_like(x)

    def call() -> tuple[torch.Tensor, ...]:
        y = layer(x)
        return (y, *torch.autograd.grad(y, [x, *layer.parameters()], dy))

    graph, answers = captured(call)
    layer.load_state_dict(eager.state_dict())
    for seed in range(3):
        new_x, new_dy = inputs((samples, 5, 9, 9), torch.float32, torch.contiguous_format, seed)
        with torch.no_grad():
            x.copy_(new_x)
            dy.copy_(new_dy)
        graph.replay()
        eager.zero_grad()
        expected = step(eager, new_x, new_dy)
        found = dict(zip(("y", "dx", "dweight", "dbias"), answers, strict=True))
        for name, value in {**found, **dict(layer.named_buffers())}.items():
            assert torch.equal(value.cpu(), expected[name]), name


@needs_gpu
@pytest.mark.parametrize("samples", [4, 0])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_replayed_graph_gives_the_bits_of_eager_calls(
    samples: int, momentum: float | None
) -> None:
    replay_as_eager(samples, momentum, "local")


def over_nccl() -> str:
    """Run a world of one that is forced to exchange."""
    torch.cuda.set_device(0)
    group = distributed.new_group([0], backend="nccl")
    assert isinstance(group, distributed.ProcessGroup)
    for layout in LAYOUTS:
        alone = normscope.BatchNorm2d(6, scope="local").to(DEVICE)
        x, dy = joined([5], layout)
        step(alone, x, dy)
        alone.zero_grad()
        assert same_bits(part_of_a_rank([5], layout, group), step(alone, x, dy))

    layer = normscope.BatchNorm2d(6, process_group=group).to(DEVICE)
    x = torch.randn(4, 6, 9, 9, device=DEVICE, requires_grad=True)
    layer(x).sum().backward()
    calls = normscope.training.communication_counters().calls
    with waiting_is_an_error():
        layer(x).sum().backward()
    assert normscope.training.communication_counters().calls == calls + 2

    distributed.barrier()
    return "equal"


@needs_gpu
def test_a_forced_exchange_over_nccl_changes_no_bit_and_does_not_wait(
    ranks: RankPool,
) -> None:
    assert ranks.run(1, over_nccl, environment=FORCED) == ["equal"]


def replay_over_nccl(samples: int, momentum: float | None) -> str:
    torch.cuda.set_device(0)
    distributed.destroy_process_group()
    distributed.init_process_group(
        "nccl", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    replay_as_eager(samples, momentum, "world")
    return "equal"


@needs_gpu
@pytest.mark.parametrize("samples", [4, 0])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_graph_includes_the_exchange(
    ranks: RankPool, samples: int, momentum: float | None
) -> None:
    answers = ranks.run(1, replay_over_nccl, samples, momentum, environment=FORCED)

    assert answers == ["equal"]


def replay_as_rank(momentum: float | None) -> str:
    replay_as_eager(3 + distributed.get_rank(), momentum, "world")
    return "equal"


@needs_gpu
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_graph_includes_the_exchange_of_several_ranks(
    graph_ranks: RankPool, momentum: float | None
) -> None:
    assert graph_ranks.run(2, replay_as_rank, momentum) == ["equal", "equal"]
