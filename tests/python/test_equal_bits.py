# SPDX-License-Identifier: Apache-2.0
"""Equal bits for any number of ranks, assignment of samples, number of threads, instruction set."""

from contextlib import closing

import pytest
import torch
from oracle import results_of
from rank_pool import RankPool, split_of
from torch import distributed

import normscope
from normscope._binding import ops

pytestmark = pytest.mark.on_device

SAMPLES = 13

# Shape without the samples, dtype, and whether the memory format is channels-last.
CASES = [
    ((5,), torch.float32, False),
    ((5,), torch.float64, False),
    ((3, 9, 7), torch.float32, False),
    ((3, 9, 7), torch.float32, True),
    ((70, 3, 3), torch.float32, True),
    ((2, 65, 64), torch.float32, False),
    ((3, 8, 8), torch.bfloat16, False),
    ((3, 8, 8), torch.bfloat16, True),
    ((3, 8, 8), torch.float16, True),
    ((3, 8, 8), torch.float16, False),
    ((3, 6, 7), torch.float64, True),
    ((3, 6, 7), torch.float64, False),
]

Tensors = dict[str, torch.Tensor]


def batch(case: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs with a nonzero mean, whose sums cancel."""
    extent, dtype, last = CASES[case]
    generator = torch.Generator().manual_seed(case)
    shape = (SAMPLES, *extent)
    x = (torch.randn(shape, generator=generator) * 5 + 100).to(dtype)
    dy = torch.randn(shape, generator=generator).to(dtype)
    if last:
        return x.to(memory_format=torch.channels_last), dy
    return x, dy


def run_case(case: int, samples: list[int]) -> Tensors:
    """Run a training step on some of the samples."""
    x, dy = (t[samples].contiguous(memory_format=_format_of(t)) for t in batch(case))
    layer = normscope.BatchNorm(x.shape[1])
    torch.nn.init.constant_(layer.weight, 0.7)
    return results_of(layer, x, dy)


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def run_rank(order: list[int], sizes: tuple[int, ...], threads: int) -> list[Tensors]:
    torch.set_num_threads(threads)
    try:
        part = split_of(sizes, distributed.get_rank())
        return [run_case(case, order[part]) for case in range(len(CASES))]
    finally:
        torch.set_num_threads(1)


def assert_same_bits(parts: list[Tensors], whole: Tensors, order: list[int], where: object) -> None:
    for name in ("y", "dx"):
        joined = torch.cat([part[name] for part in parts])
        assert torch.equal(joined, whole[name][order]), (name, where)
    for name in ("running_mean", "running_var"):
        for part in parts:
            assert torch.equal(part[name], whole[name]), (name, where)


@pytest.fixture(scope="module")
def whole() -> list[Tensors]:
    """The results of a single process with all samples."""
    return [run_case(case, list(range(SAMPLES))) for case in range(len(CASES))]


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("sizes", "threads"),
    # Tests in C++ have more ranks.
    [((13,), 2), ((1, 12), 2), ((5, 1, 7), 1), ((2, 0, 7, 4), 2)],
)
def test_ranks_agree_with_one_process_to_the_bit(
    ranks: RankPool, whole: list[Tensors], sizes: tuple[int, ...], threads: int
) -> None:
    for seed in (None, 1):
        generator = torch.Generator().manual_seed(seed or 0)
        order = torch.randperm(SAMPLES, generator=generator).tolist() if seed else [*range(SAMPLES)]

        answers = ranks.run(len(sizes), run_rank, order, sizes, threads)

        for case, expected in enumerate(whole):
            parts = [answer[case] for answer in answers]
            assert_same_bits(parts, expected, order, (CASES[case], sizes, threads, seed))


def name_of_kernels_in_use() -> str:
    return ops.installation([]).in_use


@pytest.mark.own_kernels
def test_every_instruction_set_gives_the_same_bits(whole: list[Tensors]) -> None:
    order = [*range(SAMPLES)]

    # The reference kernels are plain loops over doubles; the others only have to be close to them.
    for name in set(ops.installation([]).kernels) - {"reference"}:
        # A process chooses its backend once.
        with closing(RankPool(environment={"NORMSCOPE_KERNELS": name})) as pool:
            assert pool.run(1, name_of_kernels_in_use) == [name]
            for threads in (1, 2):
                [answers] = pool.run(1, run_rank, order, (SAMPLES,), threads)
                for case, expected in enumerate(whole):
                    assert_same_bits([answers[case]], expected, order, (CASES[case], name, threads))
