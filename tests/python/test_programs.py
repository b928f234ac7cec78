# SPDX-License-Identifier: Apache-2.0
"""Programs that combine features have the results of one process in float64, and equal bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import gpu_ranks
import pytest
import torch
import torch_device
from hypothesis import HealthCheck, example, given, settings
from programs_of_one_process import of_one_process
from programs_of_ranks import train_rank
from rank_pool import RankPool
from training_programs import NESTED, Program, Tensors, programs, programs_with_bits

PARAMETERS = ("dweight", "dbias")
OF_RANK = (*PARAMETERS, "elements")  # a part of those of the joined batch

# Of the largest entry. Two layers, each of which may divide by a small standard deviation.
TOLERANCES = {"float64": 1e-8, "float32": 1e-3}


def run_on(ranks: RankPool, program: Program, *where: str) -> list[Tensors]:
    """Run a program on ranks, on a device and over a backend if they are given."""
    where = where or ("cpu",)
    return ranks.run(program.ranks, train_rank, program, *where, environment=program.environment)


def check(ranks: RankPool, program: Program, *where: str) -> None:
    expected = of_one_process(program)

    answers = run_on(ranks, program, *where)

    for got, of_rank in zip(answers, expected, strict=True):
        assert got.keys() == of_rank.keys()
        for name, value in of_rank.items():
            # In lower precision, a sum over the samples has the errors of all of them.
            tolerance = 0.5 if name.endswith(PARAMETERS) else 0.1
            if not program.mixed:
                tolerance = TOLERANCES.get(program.dtype, tolerance)
            if value.numel() == 0:
                assert got[name].shape == value.shape
                continue
            error = (got[name].double() - value).abs().max()
            assert error <= tolerance * (1 + value.abs().max()), name


def check_bits(ranks: RankPool, program: Program) -> None:
    plain = program.plain
    expected = run_on(ranks, plain)

    answers = run_on(ranks, program)

    for rank, got in enumerate(answers):
        [of_rank] = expected if plain.joined else expected[rank : rank + 1]
        # A recomputation makes more exchanges, and a graph counts no elements.
        left_out = {"exchanges"}
        left_out |= {n for n in of_rank if "elem" in n and not program.counts_elements(rank)}
        left_out |= {n for n in of_rank if n.startswith("dx") and program.is_detached(rank)}
        assert got.keys() - {"exchanges"} == of_rank.keys() - left_out
        for name in of_rank.keys() - left_out:
            if plain.joined and name.endswith(OF_RANK):
                continue
            value, want = got[name], of_rank[name]
            if plain.joined and name == "evaluated":
                want = want[program.samples(-1, rank)]
            elif plain.joined and name[-2] in "xy":  # of the samples of a step
                want = want[program.samples(int(name[-1]), rank)]
            assert torch.equal(value, want), name


SETTINGS = settings(
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# A mask breaks the graph, and batches of another size make a rank trace the layer again, which
# keeps its number.
TRACED_AGAIN = Program(
    sizes=((3, 2), (3, 4)),
    scopes=("slices:2", "slices:2"),
    later_scopes=("world", "world"),
    seed=6,
    accumulates=True,
    masked=True,
    shared=True,
    compiled=True,
)

# The input of the second layer's backward is the recomputed output of the first one.
RECOMPUTED = Program(
    sizes=((3, 2), (3, 4)),
    scopes=("world", "slices:2"),
    later_scopes=("world", "slices:2"),
    seed=1,
    activation="leaky_relu",
    fused=True,
    checkpoint="with context",
    accumulates=True,
)

COMPILED = replace(
    RECOMPUTED, compiled=True, checkpoint="none", kernels="native", residual="first channel"
)

# The block that is recomputed is a compiled one.
RECOMPUTED_GRAPH = replace(
    COMPILED, kernels="own", residual="none", accumulates=False, checkpoint="non-reentrant"
)

# The checkpoints are in a compiled model.
CHECKPOINTS_IN_A_GRAPH = replace(RECOMPUTED_GRAPH, checkpoint="none", inner="non-reentrant")

# The output of an activation that falls and rises does not tell the sign of its input.
FALLING = Program(
    sizes=((3, 2),),
    scopes=("slices:2", "world"),
    later_scopes=("slices:2", "world"),
    seed=1,
    activation="leaky_relu",
    slope=-0.5,
    residual="input",
    fused=True,
    twice=True,
)

# Both layers have what the graph of autograd has to know: a residual, and several ranks.
GRAPH_OF_AUTOGRAD = Program(
    sizes=((3, 2), (3, 2)),
    scopes=("world", "slices:2"),
    later_scopes=("world", "slices:2"),
    seed=1,
    activation="silu",
    residual="input",
    fused=True,
    compiled_backward=True,
)

# Results of slices in a dtype that an operation under autocast does not join.
NARROW_SLICES = Program(
    sizes=((6, 5),),
    scopes=("slices:2", "slices:2"),
    later_scopes=("slices:2", "slices:2"),
    seed=1,
    dtype="bfloat16",
    kernels="native",
    eps=0.1,
    activation="silu",
    autocast="float16",
)

# A rank differentiates the gradients of its parameters only, and the other that of x, too.
WITHOUT_DX = Program(
    sizes=((2, 2),),
    scopes=("world", "world"),
    later_scopes=("world", "world"),
    seed=1,
    extent=(),
    twice=True,
    detached=True,
)

# A norm batch without elements, of several ranks and of one.
EMPTY = Program(
    sizes=((0, 0, 4), (2, 2, 0)),
    scopes=("group:2", "group:2"),
    later_scopes=("group:2", "group:2"),
    seed=1,
    extent=(),
    compiled=True,
)


@pytest.mark.on_device
@pytest.mark.own_kernels  # each program chooses its kernels
@SETTINGS
@example(program=TRACED_AGAIN)
@example(program=RECOMPUTED)
@example(program=replace(RECOMPUTED, activation="relu", residual="input"))
@example(program=replace(RECOMPUTED, masked=True, accumulates=False))
@example(program=replace(RECOMPUTED, buffers="of int32"))
@example(program=COMPILED)
@example(program=replace(COMPILED, eager=True))
@example(program=replace(COMPILED, buffers="with strides"))
@example(program=GRAPH_OF_AUTOGRAD)
@example(program=replace(GRAPH_OF_AUTOGRAD, kernels="native", activation="relu"))
@example(program=NARROW_SLICES)
@example(program=replace(NARROW_SLICES, compiled=True))
@example(program=replace(NARROW_SLICES, masked=True))
@example(program=replace(COMPILED, kernels="synchronized", eager=True))
@example(program=RECOMPUTED_GRAPH)
@example(program=CHECKPOINTS_IN_A_GRAPH)
@example(program=replace(CHECKPOINTS_IN_A_GRAPH, inner="with context"))
@example(program=FALLING)
@example(program=replace(FALLING, buffers="of int32"))
@example(program=WITHOUT_DX)
@example(program=replace(WITHOUT_DX, kernels="native"))
@example(program=EMPTY)
@example(program=replace(EMPTY, kernels="native"))
@example(program=replace(EMPTY, kernels="synchronized"))
@given(program=programs())
def test_programs_have_the_results_of_one_process(
    pools: dict[str, RankPool], program: Program
) -> None:
    check(pools[program.kernels], program)


# The scopes change before each backward.
CHANGED = Program(
    sizes=((3, 2), (3, 4)),
    scopes=("world", "slices:2"),
    later_scopes=("local", "world"),
    seed=1,
    named=True,
    rescoped=True,
)


@pytest.mark.parametrize(
    ("order", "threaded"), [("in turn", True), ("reversed", False), ("together", True)]
)
@pytest.mark.parametrize(
    ("checkpoint", "inner"),
    [
        *product(("reentrant", "non-reentrant", "with context"), ["none"]),
        *product(NESTED, repeat=2),
    ],
)
def test_a_recomputation_has_the_scope_of_its_forward_in_any_thread(
    ranks: RankPool, checkpoint: str, inner: str, order: str, *, threaded: bool
) -> None:
    program = replace(CHANGED, checkpoint=checkpoint, inner=inner, order=order, threaded=threaded)

    check(ranks, program)


@pytest.mark.slow
@settings(SETTINGS, max_examples=300)
@given(program=programs())
def test_many_programs_have_the_results_of_one_process(
    pools: dict[str, RankPool], program: Program
) -> None:
    check(pools[program.kernels], program)


# A group that is split into a part of two ranks and one that is alone.
PARTS = Program(
    sizes=((3, 2, 2),),
    scopes=("group:2", "world"),
    later_scopes=("group:2", "world"),
    seed=1,
    dtype="float32",
    activation="silu",
)


@pytest.mark.parametrize("backend", [torch_device.BACKENDS, "gloo"])
def test_programs_on_a_device_have_the_results_of_one_process(
    devices: RankPool, backend: str
) -> None:
    @settings(SETTINGS, max_examples=20)
    @example(program=PARTS)
    @given(program=programs())
    def check_on_device(program: Program) -> None:
        check(devices, program, torch_device.NAME, backend)

    check_on_device()


# Graphs of all dtypes, with other arguments, and with an empty batch.
GRAPH = Program(
    sizes=((7,), (6,)),
    scopes=("local", "slices:3"),
    later_scopes=("local", "slices:3"),
    seed=1,
    extent=(3, 2),
    dtype="float32",
    compiled=True,
)
FUSED_GRAPH = replace(GRAPH, fused=True, residual="input", strides="channels last")
SEQUENTIAL_GRAPH = replace(
    GRAPH, slice_stats="sequential", momentum=None, parameters=(), sizes=((0,), (6,))
)

# Ranks, one of them without samples, that share all norm batches.
RANKS = Program(
    sizes=((5, 1, 7), (2, 0, 4)),
    scopes=("world", "world"),
    later_scopes=("world", "world"),
    seed=1,
    extent=(9, 7),
)

# Replicas have no running statistics, and some no gradients and no samples.
REPLICAS = Program(
    sizes=((3, 0, 4),),
    scopes=("world", "world"),
    later_scopes=("world", "world"),
    seed=1,
    tracks=False,
    twin=True,
    joined=True,
    replicas=True,
)


@pytest.mark.on_device
@pytest.mark.own_kernels
@settings(SETTINGS, max_examples=60)
@example(program=RANKS)
@example(program=replace(RANKS, dtype="float32", strides="channels last"))
@example(program=replace(RANKS, dtype="bfloat16"))
@example(program=REPLICAS)
@example(program=replace(REPLICAS, detached=True))
@example(program=replace(REPLICAS, strides="channels last"))
@example(program=GRAPH)
@example(program=replace(GRAPH, dtype="float64", strides="channels last"))
@example(program=replace(GRAPH, extent=(6,), strides="channels last"))
@example(program=replace(GRAPH, dtype="bfloat16", tracks=False, elsewhere=True))
@example(program=replace(FUSED_GRAPH, dtype="bfloat16", activation="hard_swish"))
@example(program=replace(FUSED_GRAPH, dtype="float16", activation="relu6"))
@example(program=SEQUENTIAL_GRAPH)
@given(program=programs_with_bits())
def test_programs_have_the_bits_of_their_plain_form(ranks: RankPool, program: Program) -> None:
    check_bits(ranks, program)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuda: no device")
@pytest.mark.parametrize("kernels", ["", "torch"])  # the library's own if they are built
@pytest.mark.parametrize(
    ("backend", "examples"), [("gloo", 12), pytest.param("nccl", 8, marks=pytest.mark.nccl)]
)
def test_programs_on_gpus_have_the_results_of_one_process(
    kernels: str, backend: str, examples: int
) -> None:
    if backend == "nccl" and (reason := gpu_ranks.reason_here(2)) is not None:
        pytest.skip(reason)
    pool = RankPool(environment={"NORMSCOPE_DEVICE_KERNELS": kernels}, backend=backend)
    most = 3 if backend == "gloo" else gpu_ranks.most_here()

    @settings(SETTINGS, max_examples=examples)
    @given(program=programs().filter(lambda program: program.ranks <= most))
    def check_on_gpu(program: Program) -> None:
        check(pool, program, "cuda")

    check_on_gpu()
    if most > 2:
        check(pool, PARTS, "cuda")
    pool.close()
