# SPDX-License-Identifier: Apache-2.0
"""Layers by torch's own kernels, with which devices without kernels of normscope train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import arithmetic_epsilon, layer_for, oracle_of, results_of
from programs import printed
from rank_pool import RankPool, split_of
from torch import distributed
from torch.utils.checkpoint import checkpoint

import normscope

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["native", "synchronized"])
def pool(request: pytest.FixtureRequest, pools: dict[str, RankPool]) -> RankPool:
    """Ranks on the CPU whose tensors torch's kernels normalize."""
    return pools[request.param]


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Tensors:
    results = results_of(layer, x, dy=dy)
    assert results["y"].stride() == x.stride() or not x.numel()
    return {name: value.cpu().double() for name, value in results.items()}


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 2 + 10
    return x.to(dtype), torch.randn(shape, generator=generator).to(dtype)


def of_oracle(
    shape: tuple[int, ...], x: torch.Tensor, dy: torch.Tensor, momentum: float | None
) -> Tensors:
    """Return the results of torch's layer in float64."""
    layer = layer_for(len(shape), shape[1], momentum=momentum)
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
    layer = layer_for(len(shape), shape[1], scope=scope, momentum=momentum).to(device)
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


# The drawn programs of test_programs.py have other dtypes.
@pytest.mark.parametrize(
    ("shape", "sizes", "momentum", "dtype"),
    [
        ((6, 3, 4, 5), (1, 0, 5), 0.1, torch.bfloat16),
        ((8, 2), (3, 5), None, torch.bfloat16),
        ((5, 3, 7), (2, 3), 0.1, torch.float32),
    ],
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

    pool.close()
    assert_trains_like_torch(answers, shape, sizes, torch.float32, 0.1)


def normalize(x: torch.Tensor, mask: torch.Tensor | None, settings: dict[str, Any]) -> torch.Tensor:
    layer = normscope.BatchNorm2d(x.shape[1], scope="slices:2", **settings)
    y: torch.Tensor = layer(x, mask=mask)
    return y.detach()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("affine", "masked"), [(False, False), (True, True)])
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


def test_the_command_names_the_kernels_of_each_device(pools: dict[str, RankPool]) -> None:
    [output] = pools["native"].run(1, printed)

    assert "torch's native_batch_norm, because of NORMSCOPE_DEVICE_KERNELS=torch" in output
