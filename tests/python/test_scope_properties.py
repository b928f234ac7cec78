# SPDX-License-Identifier: Apache-2.0
"""Any scope, split, dtype and layout gives the results of torch's layer on each norm batch."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from oracle import Answers, assert_within, bounds, layer_for, oracle_of, step
from rank_pool import RankPool
from torch import distributed

CHANNELS = 3


@dataclass(frozen=True)
class Case:
    """A training step on several ranks."""

    scope: str
    shapes: tuple[tuple[int, ...], ...]  # of each rank's input, [N, C, *]
    hosts: str  # a letter for the host of each rank
    transport: str = "shared memory"
    dtype: torch.dtype = torch.float64
    channels_last: bool = False
    offset: float = 3.0
    seed: int = 0

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's input, and the gradient of its output."""
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        x, dy = (torch.randn(self.shapes[rank], generator=generator) for _ in range(2))
        x, dy = (x + self.offset).to(self.dtype), dy.to(self.dtype)
        if self.channels_last:
            return tuple(t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, dy))  # type: ignore[return-value]
        return x, dy


def sharing(case: Case) -> list[list[int]]:
    """Return the sets of ranks that share statistics, as documented for each scope."""
    size = len(case.shapes)
    kind, _, argument = case.scope.partition(":")
    if kind == "world":
        return [list(range(size))]
    if kind == "group":
        return consecutive(size, int(argument))
    if kind == "node":
        return [[r for r in range(size) if case.hosts[r] == host] for host in set(case.hosts)]
    if kind == "ranks":
        sets = [[int(rank) for rank in text.split(",")] for text in argument.split("/")]
        return sets + [[rank] for rank in range(size) if not any(rank in s for s in sets)]
    if kind == "norm_batch":
        return sharing(dataclasses.replace(case, scope=resolved_norm_batch(case)))
    return [[rank] for rank in range(size)]


def consecutive(size: int, count: int) -> list[list[int]]:
    return [list(range(first, min(first + count, size))) for first in range(0, size, count)]


def resolved_norm_batch(case: Case) -> str:
    """Find the smallest scope with a norm batch of the wanted size by trying all of them."""
    wanted = int(case.scope.partition(":")[2])
    samples = max(shape[0] for shape in case.shapes)
    if samples >= 2 * wanted:
        return f"slices:{samples // wanted}"
    for ranks in range(1, len(case.shapes)):
        if ranks * samples >= wanted:
            return f"group:{ranks}"
    return "world"


def slices_of(case: Case) -> int:
    scope = resolved_norm_batch(case) if case.scope.startswith("norm_batch") else case.scope
    return int(scope.partition(":")[2]) if scope.startswith("slices") else 1


def row(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join the elements of inputs [N, C, *] of any shapes in one sample [1, C, n]."""
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], 1)[None]


def norm_batches(case: Case, members: list[int]) -> list[list[tuple[int, slice]]]:
    """Return the samples of each norm batch of ranks that share statistics, by rank."""
    batches = [[(member, slice(None)) for member in members]]
    if slices_of(case) > 1:
        [member] = members
        samples = torch.arange(case.shapes[member][0])
        ends = [0, *torch.tensor([len(part) for part in samples.chunk(slices_of(case))]).cumsum(0)]
        batches = [[(member, slice(int(a), int(b)))] for a, b in pairwise(ends)]
    return [b for b in batches if any(case.inputs(m)[0][part].numel() for m, part in b)]


def values_per_channel(case: Case, batch: list[tuple[int, slice]]) -> int:
    return sum(case.inputs(member)[0][part].numel() for member, part in batch) // CHANNELS


def step_of_rank(case: Case) -> Answers:
    rank = distributed.get_rank()
    os.environ["NORMSCOPE_NODE"] = case.hosts[rank]
    x, dy = case.inputs(rank)
    answers = step(layer_for(x.dim(), CHANNELS, scope=case.scope), x, dy)
    if x.dim() > 3 and min(x.shape) > 1:  # in a memory format, and in no other
        assert answers.y.stride() == answers.dx.stride() == x.stride()
    return answers


def assert_as_oracle(case: Case, members: list[int], answers: list[Answers]) -> None:
    """Assert that ranks that share statistics have computed the same as torch in float64."""
    dweight = dbias = torch.zeros(CHANNELS, dtype=torch.float64)
    gradient_bounds = {
        name: torch.zeros(CHANNELS, dtype=torch.float64) for name in ("dweight", "dbias")
    }
    for batch in norm_batches(case, members):
        x, dy = (row([case.inputs(m)[i][part] for m, part in batch]) for i in range(2))
        expected, allowed = expected_on(x, dy)
        dweight, dbias = dweight + expected.dweight, dbias + expected.dbias
        for name, bound in gradient_bounds.items():
            bound += allowed[name]
        got = dataclasses.replace(
            expected,
            y=row([answers[m].y[part] for m, part in batch]),
            dx=row([answers[m].dx[part] for m, part in batch]),
        )
        assert_within(got, expected, {name: allowed[name] for name in ("y", "dx")})

    whole, of_whole = expected_on(*(row([case.inputs(m)[i] for m in members]) for i in range(2)))
    expected = dataclasses.replace(whole, dweight=dweight, dbias=dbias)
    for member in members:
        got = dataclasses.replace(
            answers[member],
            dweight=torch.stack([answers[m].dweight for m in members]).sum(0),
            dbias=torch.stack([answers[m].dbias for m in members]).sum(0),
        )
        # Each rank rounds its own sum once, to the dtype of the gradient.
        rounding = torch.finfo(torch.float32).eps * len(members)
        of_gradients = {
            name: bound
            + rounding * torch.stack([getattr(answers[m], name).abs() for m in members]).sum(0)
            for name, bound in gradient_bounds.items()
        }
        running = {name: of_whole[name] for name in ("running_mean", "running_var")}
        assert_within(got, expected, running | of_gradients)


def expected_on(x: torch.Tensor, dy: torch.Tensor) -> tuple[Answers, dict[str, torch.Tensor]]:
    """Return the oracle's answers for a norm batch [1, C, n], and the allowed differences."""
    layer = layer_for(3, CHANNELS)
    oracle = oracle_of(layer, 3)
    if x.numel() == 0:
        nothing, zero = torch.zeros_like(x, dtype=torch.float64), torch.zeros(CHANNELS).double()
        untouched = Answers(nothing, nothing, zero, zero, zero, zero + 1)
        return untouched, dict.fromkeys(("running_mean", "running_var"), zero)
    expected = step(oracle, x.double(), dy.double())
    return expected, dict(bounds(x, dy, layer, expected))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    dims = draw(st.integers(0, 3))
    extent = st.integers(1, 9) if dims > 2 else st.sampled_from([*range(1, 10), 31, 64, 65])
    shapes = tuple(
        (draw(st.integers(0, 5)), CHANNELS, *(draw(extent) for _ in range(dims)))
        for _ in range(size)
    )
    return Case(
        scope=draw(scopes(size)),
        shapes=shapes,
        hosts="".join(draw(st.sampled_from("abc")) for _ in range(size)),
        transport=draw(st.sampled_from(["shared memory", "gloo"])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        channels_last=draw(st.booleans()),
        offset=draw(st.sampled_from([0.0, 3.0, -40.0])),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def scopes(draw: st.DrawFn, size: int) -> str:
    """Draw any scope that is valid for ``size`` ranks."""
    kind = draw(
        st.sampled_from(["local", "world", "node", "slices", "group", "norm_batch", "ranks"])
    )
    if kind in ("local", "world", "node"):
        return kind
    if kind == "group":
        return f"group:{draw(st.integers(1, size))}"
    if kind == "ranks":
        order = draw(st.permutations(range(size)))
        ends = sorted({draw(st.integers(1, size)) for _ in range(draw(st.integers(1, 3)))})
        sets = [order[a:b] for a, b in pairwise([0, *ends])]
        return "ranks:" + "/".join(",".join(map(str, members)) for members in sets)
    return f"{kind}:{draw(st.integers(1, 12))}"


def check(ranks: RankPool, case: Case) -> None:
    groups = sharing(case)
    for members in groups:
        for batch in norm_batches(case, members):
            assume(values_per_channel(case, batch) > 1)  # otherwise an error, as in torch

    environment = {"NORMSCOPE_SHARED_MEMORY": "0" if case.transport == "gloo" else "1"}
    answers = ranks.run(len(case.shapes), step_of_rank, case, environment=environment)

    for members in groups:
        assert_as_oracle(case, members, answers)


def case_of(scope: str, samples: tuple[int, ...], hosts: str, transport: str = "gloo") -> Case:
    """Return a case with some samples of six values per channel on each rank."""
    return Case(scope, tuple((count, CHANNELS, 2, 3) for count in samples), hosts, transport)


@pytest.mark.on_device
@pytest.mark.own_kernels
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@example(case=case_of("group:4", (2, 1, 3, 1, 2, 4), "aaaaaa"))
@example(case=case_of("node", (2, 3, 2, 4), "abab"))
@example(case=case_of("node", (2, 3, 2, 4, 2, 1), "aabbcb", "shared memory"))
@example(case=case_of("ranks:5,1,3/0,2", (2, 1, 3, 1, 4, 4), "aaaaaa"))
@example(case=case_of("norm_batch:3", (2, 2, 1), "aaa"))
@example(case=case_of("norm_batch:2", (9, 5), "aa"))
@example(case=Case("local", ((2, CHANNELS, 65, 64),), "a", dtype=torch.float32))
@example(case=Case("local", ((3, CHANNELS, 8, 9),), "a", dtype=torch.float16, channels_last=True))
@example(case=Case("slices:2", ((2, CHANNELS, 4, 5, 6),), "a", channels_last=True))
@given(case=cases())
def test_any_scope_matches_the_oracle_on_its_norm_batches(ranks: RankPool, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_any_scope_matches_the_oracle_on_many_norm_batches(ranks: RankPool, case: Case) -> None:
    check(ranks, case)
