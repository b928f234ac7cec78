# SPDX-License-Identifier: Apache-2.0
"""Equal bits for any number of threads and instruction set; test_programs.py has those of ranks."""

from contextlib import closing

import pytest
import torch
from oracle import results_of
from rank_pool import RankPool

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


def run_case(shape: tuple[int, ...], dtype: torch.dtype, *, last: bool) -> Tensors:
    """Run a training step on inputs with a nonzero mean, whose sums cancel."""
    torch.manual_seed(0)
    x = (torch.randn(SAMPLES, *shape) * 5 + 100).to(dtype)
    dy = torch.randn(SAMPLES, *shape).to(dtype)
    if last:
        x, dy = (t.to(memory_format=torch.channels_last) for t in (x, dy))
    layer = normscope.BatchNorm(x.shape[1])
    torch.nn.init.constant_(layer.weight, 0.7)
    return results_of(layer, x, dy)


def run_cases(threads: int) -> list[Tensors]:
    torch.set_num_threads(threads)
    try:
        return [run_case(shape, dtype, last=last) for shape, dtype, last in CASES]
    finally:
        torch.set_num_threads(1)


def name_of_kernels_in_use() -> str:
    return ops.installation([]).in_use


@pytest.mark.own_kernels
def test_every_instruction_set_gives_the_same_bits() -> None:
    expected = [run_case(shape, dtype, last=last) for shape, dtype, last in CASES]

    # The reference kernels are plain loops over doubles; the others only have to be close to them.
    for name in set(ops.installation([]).kernels) - {"reference"}:
        # A process chooses its backend once.
        with closing(RankPool(environment={"NORMSCOPE_KERNELS": name})) as pool:
            assert pool.run(1, name_of_kernels_in_use) == [name]
            for threads in (1, 2):
                [answers] = pool.run(1, run_cases, threads)
                for case, got, of_case in zip(CASES, answers, expected, strict=True):
                    for result, value in of_case.items():
                        assert torch.equal(got[result], value), (result, case, name, threads)
