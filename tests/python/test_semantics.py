# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/semantics.md. Each rule has one test here, which is named after it.

Other files test the same rules more thoroughly.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, split_of
from replicas import replicas_of, run_replicas
from torch import distributed
from torch.utils.checkpoint import checkpoint

import normscope

DOCUMENT = Path(__file__).parents[2] / "docs" / "semantics.md"

# A few hundred elements in float64 (eps 2e-16), condition number one: some hundred roundings.
ROUNDING = 1e-12

Tensors = dict[str, torch.Tensor]


def joined(samples: int, *, extent: tuple[int, ...] = (4, 5)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, *extent, generator=generator, dtype=torch.float64) * 3 + 7


def step(layer: torch.nn.Module, x: torch.Tensor) -> Tensors:
    """Run a forward, and a backward with a non-constant gradient."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(y.detach().sin())
    gradients = {f"d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients, **copy.deepcopy(layer.state_dict())}


def calls() -> int:
    return normscope.training.communication_counters().calls


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=ROUNDING, atol=ROUNDING)


def test_rules_and_tests_correspond() -> None:
    named = re.findall(r"`(test_\w+)`", DOCUMENT.read_text())
    here = [name for name in globals() if name.startswith("test_")]

    assert sorted([*named, "test_rules_and_tests_correspond"]) == sorted(here)


def eval_calls() -> int:
    before = calls()
    layer = normscope.BatchNorm2d(3).eval()
    layer(torch.ones(2, 3, 4, 4))
    if distributed.get_world_size() == 1:
        step(layer.train(), torch.randn(4, 3, 4, 4))
    return calls() - before


def test_eval_a_world_of_one_and_no_process_group_make_no_collective(ranks: RankPool) -> None:
    assert ranks.run(2, eval_calls) == [0, 0]
    assert ranks.run(1, eval_calls) == [0]
    assert ranks.run(1, eval_calls, environment={"NORMSCOPE_FORCE_SYNC": "1"}) == [2]
    assert not distributed.is_initialized()
    before = calls()
    step(normscope.BatchNorm2d(3), torch.randn(4, 3, 4, 4))
    assert calls() == before


def test_eval_is_torch_s_arithmetic_to_the_bit_whatever_the_scope() -> None:
    theirs = torch.nn.BatchNorm2d(3).eval()
    x = torch.randn(5, 3, 4, 4)
    for scope in ("world", "local", "slices:2", "group:2", "node", "ranks:0,1", "norm_batch:2"):
        ours = normscope.BatchNorm2d(3, scope=scope).eval()
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours(x), theirs(x))


def eval_without_statistics() -> bool:
    x = torch.randn(4, 3, 5, 5) + distributed.get_rank()
    ours = normscope.BatchNorm2d(3, track_running_stats=False).eval()
    theirs = torch.nn.BatchNorm2d(3, track_running_stats=False).eval()
    return torch.equal(ours(x), theirs(x))


def test_eval_without_running_statistics_uses_this_rank_s_batch(ranks: RankPool) -> None:
    assert ranks.run(2, eval_without_statistics) == [True, True]


def test_momentum_none_averages_cumulatively() -> None:
    ours = normscope.BatchNorm2d(3, momentum=None).double()
    theirs = torch.nn.BatchNorm2d(3, momentum=None).double()
    for samples in (4, 2, 7):
        assert_near(ours(joined(samples)), theirs(joined(samples)))

    for name, value in theirs.state_dict().items():
        assert_near(ours.state_dict()[name], value)


# N and L of the input [N, C, L] of each rank, with different numbers of elements.
RAGGED = ((2, 5), (3, 1), (1, 4))


def ragged_parts() -> list[torch.Tensor]:
    return [joined(samples, extent=(length,)) for samples, length in RAGGED]


def step_of_ragged_rank() -> Tensors:
    layer = normscope.BatchNorm1d(3, dtype=torch.float64)
    return step(layer, ragged_parts()[distributed.get_rank()])


def test_uneven_batches_and_spatial_sizes_weigh_by_elements(ranks: RankPool) -> None:
    # All positions of all parts, joined in a single sample.
    rows = [part.transpose(0, 1).flatten(1) for part in ragged_parts()]
    expected = step(torch.nn.BatchNorm1d(3, dtype=torch.float64), torch.cat(rows, 1)[None])
    ends = torch.tensor([0, *(row.shape[1] for row in rows)]).cumsum(0).tolist()

    for rank, got in enumerate(ranks.run(3, step_of_ragged_rank)):
        for name in ("y", "dx"):
            wanted = expected[name][0, :, ends[rank] : ends[rank + 1]]
            assert_near(got[name].transpose(0, 1).flatten(1), wanted)
        for name in ("running_mean", "running_var"):
            assert_near(got[name], expected[name])


def step_of_part(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensors, int]:
    before = calls()
    x = joined(sum(sizes)).to(dtype)[split_of(sizes, distributed.get_rank())]
    answers = step(normscope.BatchNorm2d(3), x)
    return answers, calls() - before


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_a_rank_with_an_empty_batch_takes_part_with_count_zero(
    ranks: RankPool, dtype: torch.dtype
) -> None:
    [(expected, _)] = ranks.run(1, step_of_part, (4,), dtype)

    for rank, (got, made) in enumerate(ranks.run(3, step_of_part, (0, 4, 0), dtype)):
        assert made == 2
        assert got["y"].shape == got["dx"].shape == ((0, 4, 0)[rank], 3, 4, 5)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(got[name], expected[name])
    [(got, _), *_] = ranks.run(2, step_of_part, (0, 0), dtype)
    assert got["num_batches_tracked"].item() == 0


def step_of_masked_rank() -> tuple[Tensors, torch.Tensor]:
    x = joined(4)[split_of((1, 3), distributed.get_rank())]
    mask = x[:, :1] > 7
    answers = step(
        Masked(normscope.BatchNorm2d(3, dtype=torch.float64), mask),
        torch.where(mask, x, float("nan")),
    )
    return answers, mask


class Masked(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module, mask: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.mask = layer, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x, mask=self.mask)
        return y


def test_only_what_a_mask_leaves_counts_and_zeros_are_elsewhere(ranks: RankPool) -> None:
    rows = joined(4).movedim(1, -1)
    expected = step(normscope.BatchNorm1d(3, dtype=torch.float64), rows[rows[..., 0] > 7])
    answers = ranks.run(2, step_of_masked_rank)

    for name in ("y", "dx"):
        got = [got[name].movedim(1, -1)[mask.squeeze(1)] for got, mask in answers]
        assert torch.equal(torch.cat(got), expected[name])
    for got, mask in answers:
        assert got["y"][~mask.expand_as(got["y"])].count_nonzero() == 0
        assert got["dx"][~mask.expand_as(got["y"])].count_nonzero() == 0
        for name in ("running_mean", "running_var"):
            assert torch.equal(got[f"layer.{name}"], expected[name])


def weighted_means_of_joined_batches(values: tuple[tuple[float, ...], ...]) -> list[float]:
    own = values[distributed.get_rank()]
    batches = [torch.arange(n).double() for n in own]
    return [x.sum().item() * w for x, w in normscope.joined(batches, like=torch.zeros(1).double())]


def test_ranks_out_of_batches_step_until_all_are(ranks: RankPool) -> None:
    sizes = ((3, 2), (5,), ())

    steps = ranks.run(3, weighted_means_of_joined_batches, sizes)

    assert [len(of_rank) for of_rank in steps] == [2, 2, 2]
    for means, there in zip(zip(*steps, strict=True), ((3, 5), (2,)), strict=True):
        expected = torch.cat([torch.arange(n).double() for n in there]).mean()
        assert_near(torch.tensor(means).double().mean(), expected)


def forward_where_rank_0_needs_no_gradient() -> str:
    layer = normscope.BatchNorm2d(3)
    if distributed.get_rank() == 0:
        layer.requires_grad_(requires_grad=False)
    with pytest.raises(RuntimeError) as raised:
        layer(torch.randn(2, 3, 4, 4))
    return str(raised.value)


def test_ranks_that_disagree_whether_backward_follows_all_raise_in_forward(
    ranks: RankPool,
) -> None:
    for text in ranks.run(2, forward_where_rank_0_needs_no_gradient):
        assert re.search(r"rank 0: .*nothing needs a gradient\)\n.*rank 1: (?!.*nothing)", text), (
            text
        )


def step_with_frozen_input() -> Tensors:
    layer = normscope.BatchNorm2d(3, dtype=torch.float64)
    part = joined(4)[split_of((2, 2), distributed.get_rank())]
    part = part.detach().requires_grad_(distributed.get_rank() == 1)
    y = layer(part)
    y.backward(y.detach().sin())
    assert layer.weight.grad is not None
    distributed.all_reduce(layer.weight.grad)
    return {"dweight": layer.weight.grad}


def test_an_input_without_gradient_under_affine_parameters_takes_part(ranks: RankPool) -> None:
    expected = step(torch.nn.BatchNorm2d(3, dtype=torch.float64), joined(4))

    for got in ranks.run(2, step_with_frozen_input):
        assert_near(got["dweight"], expected["dweight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_outputs_have_the_input_s_dtype_and_statistics_are_never_narrow(dtype: torch.dtype) -> None:
    layer = normscope.BatchNorm2d(3)
    # Mean 7 and deviation 3, in steps of 1e-3 that 16 bits cannot resolve.
    x = joined(64).to(dtype)
    answers = step(layer, x)

    assert answers["y"].dtype == answers["dx"].dtype == dtype
    assert answers["running_mean"].dtype == torch.float32
    # Expected from the converted input: sums in 16 bits would be off by 1e-3, float32's by 5e-6.
    mean = 0.1 * x.double().mean((0, 2, 3))
    torch.testing.assert_close(answers["running_mean"].double(), mean, rtol=5e-6, atol=0)


@pytest.mark.parametrize("dim", [2, 3, 4, 5])
def test_any_strides_are_right_and_y_and_dx_keep_the_memory_format(dim: int) -> None:
    extent = (2, 4, 5)[: dim - 2]
    last = torch.channels_last_3d if dim == 5 else torch.channels_last
    inputs = [joined(6, extent=extent)]
    inputs.append(inputs[0].transpose(0, 1).contiguous().transpose(0, 1))
    if dim >= 4:
        inputs.append(inputs[0].to(memory_format=last))
    layer = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}.get(
        dim, torch.nn.BatchNorm3d
    )
    expected = step(layer(3, dtype=torch.float64), inputs[0])

    for x in inputs:
        got = step(normscope.convert(layer(3, dtype=torch.float64)), x)
        assert_near(got["y"], expected["y"])
        assert_near(got["dx"], expected["dx"])
        if x.is_contiguous() or (dim >= 4 and x.is_contiguous(memory_format=last)):
            assert got["y"].stride() == got["dx"].stride() == x.stride()


def test_slices_are_torch_s_chunks_with_three_rules_for_running_statistics() -> None:
    x = joined(7)  # chunks of 3, 3 and 1 samples
    chunked = torch.nn.BatchNorm2d(3, dtype=torch.float64)
    y = torch.cat([chunked(chunk) for chunk in x.chunk(3)])
    first = torch.nn.BatchNorm2d(3, dtype=torch.float64)
    first(x.chunk(3)[0])
    whole = torch.nn.BatchNorm2d(3, dtype=torch.float64)
    whole(x)

    for rule, expected in (("sequential", chunked), ("first", first), ("pooled", whole)):
        layer = normscope.BatchNorm2d(
            3,
            dtype=torch.float64,
            scope="slices:3",
            slice_stats=rule,  # type: ignore[arg-type]
        )
        assert_near(layer(x), y)
        for name, value in expected.state_dict().items():
            assert_near(layer.state_dict()[name], value)
        assert_near(layer.eval()(x), expected.eval()(x))


def pool_and_estimate() -> list[Tensors]:
    """Pool and estimate on ranks with 3 and 1 samples, after a single update with momentum 1."""
    x = joined(4)[split_of((3, 1), distributed.get_rank())]
    layer = normscope.BatchNorm2d(3, momentum=1.0, dtype=torch.float64, scope="local")
    layer(x)
    own = copy.deepcopy(layer.state_dict())
    normscope.sync_running_stats(layer)
    pooled = copy.deepcopy(layer.state_dict())
    normscope.estimate_running_stats(layer, [x])
    return [own, pooled, copy.deepcopy(layer.state_dict())]


def test_ranks_pool_or_estimate_their_running_statistics_to_the_same_bits(ranks: RankPool) -> None:
    answers = ranks.run(2, pool_and_estimate)
    over = (0, 2, 3)
    [big, small], [pooled, other_pooled], [estimated, other_estimated] = zip(*answers, strict=True)

    for name in ("running_mean", "running_var"):
        assert torch.equal(pooled[name], other_pooled[name])
        assert torch.equal(estimated[name], other_estimated[name])
    mean = joined(4).mean(over)
    assert_near(pooled["running_mean"], mean)
    within = 0.75 * big["running_var"] + 0.25 * small["running_var"]
    between = 0.75 * (big["running_mean"] - mean) ** 2 + 0.25 * (small["running_mean"] - mean) ** 2
    assert_near(pooled["running_var"], within + between)
    assert_near(estimated["running_mean"], mean)
    assert_near(estimated["running_var"], joined(4).var(over))


def test_state_dicts_have_torch_s_keys_and_shapes() -> None:
    for keywords in ({}, {"affine": False}, {"track_running_stats": False}):
        ours = normscope.BatchNorm2d(3, scope="group:2", **keywords)  # type: ignore[arg-type]
        theirs = torch.nn.BatchNorm2d(3, **keywords)
        assert [(k, v.shape, v.dtype) for k, v in ours.state_dict().items()] == [
            (k, v.shape, v.dtype) for k, v in theirs.state_dict().items()
        ]
        ours.load_state_dict(theirs.state_dict(), strict=True)
        theirs.load_state_dict(ours.state_dict(), strict=True)


def test_a_layer_s_scope_survives_deepcopy_pickle_and_torch_save() -> None:
    layer = normscope.convert(torch.nn.BatchNorm2d(3), "ranks:0,1/2,3")
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)

    for twin in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert twin.scope == normscope.Scope("ranks:0,1/2,3")
        assert torch.equal(
            twin.eval()(torch.ones(2, 3, 1, 1)), layer.eval()(torch.ones(2, 3, 1, 1))
        )


def local_affine_gradients() -> Tensors:
    part = split_of((1, 3), distributed.get_rank())
    return step(normscope.BatchNorm2d(3, dtype=torch.float64), joined(4)[part])


def test_affine_gradients_are_this_rank_s_sums(ranks: RankPool) -> None:
    expected = step(torch.nn.BatchNorm2d(3, dtype=torch.float64), joined(4))
    xhat = expected["y"]  # weight 1 and bias 0
    terms = {"dweight": xhat.sin() * xhat, "dbias": xhat.sin()}

    for rank, got in enumerate(ranks.run(2, local_affine_gradients)):
        for name, value in terms.items():
            assert_near(got[name], value[split_of((1, 3), rank)].sum((0, 2, 3)))


def test_two_forwards_may_precede_one_backward() -> None:
    gradients = []
    for layer in (normscope.BatchNorm2d(3).double(), torch.nn.BatchNorm2d(3).double()):
        x = joined(4).requires_grad_()
        (layer(x).sin().sum() + layer(x * x).cos().sum()).backward()
        gradients.append(x.grad)

    assert gradients[0] is not None
    assert gradients[1] is not None
    assert_near(gradients[0], gradients[1])


def gradient_penalty(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    [dx] = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
    [second] = torch.autograd.grad(dx.square().sum(), x)
    return second


def gradient_penalty_of_rank() -> tuple[torch.Tensor, int]:
    part = split_of((1, 3), distributed.get_rank())
    before = calls()
    second = gradient_penalty(normscope.BatchNorm2d(3, dtype=torch.float64), joined(4)[part])
    return second, calls() - before


def test_double_backward_is_torch_s_over_the_norm_batch(ranks: RankPool) -> None:
    expected = gradient_penalty(torch.nn.BatchNorm2d(3, dtype=torch.float64), joined(4))

    for rank, (got, sent) in enumerate(ranks.run(2, gradient_penalty_of_rank)):
        assert sent == 4  # forward, backward, double backward, and backward again: y is in sin(y)
        assert_near(got, expected[split_of((1, 3), rank)])


def checkpointed_step(reentrant: bool, reuses: bool) -> tuple[Tensors, int]:  # noqa: FBT001
    context: dict[str, Any] = {"context_fn": normscope.checkpoint_context} if reuses else {}
    layer = normscope.BatchNorm2d(3, dtype=torch.float64)
    x = joined(4)[split_of((1, 3), distributed.get_rank())].requires_grad_()
    before = calls()
    y = checkpoint(layer, x, use_reentrant=reentrant, **context)
    y.backward(y.detach().sin())
    assert x.grad is not None
    return {"dx": x.grad, **layer.state_dict()}, calls() - before


@pytest.mark.parametrize(
    ("reentrant", "reuses", "exchanges"), [(True, False, 3), (False, False, 3), (False, True, 2)]
)
def test_activation_checkpointing_never_updates_twice(
    ranks: RankPool,
    reentrant: bool,  # noqa: FBT001
    reuses: bool,  # noqa: FBT001
    exchanges: int,
) -> None:
    expected = step(torch.nn.BatchNorm2d(3, dtype=torch.float64), joined(4))

    for rank, (got, sent) in enumerate(ranks.run(2, checkpointed_step, reentrant, reuses)):
        assert sent == exchanges
        assert_near(got.pop("dx"), expected["dx"][split_of((1, 3), rank)])
        for name, value in got.items():
            assert_near(value, expected[name])


def test_replicas_of_data_parallel_share_statistics() -> None:
    layer, expected = (normscope.BatchNorm2d(3, dtype=torch.float64) for _ in range(2))
    x = joined(5)
    outputs = run_replicas(replicas_of(layer, 2), x.split([2, 3]))
    assert torch.equal(torch.cat(outputs), expected(x))
    assert all(map(torch.equal, layer.buffers(), expected.buffers()))


def test_accumulate_makes_one_update_of_several_batches() -> None:
    layer, expected = (normscope.BatchNorm2d(3, dtype=torch.float64) for _ in range(2))
    x = joined(5)
    with normscope.accumulate(layer):
        for part in x.split([2, 3]):
            layer(part)
    expected(x)
    assert all(map(torch.equal, layer.buffers(), expected.buffers()))


def test_torch_func_evaluates_as_torch_and_raises_in_training() -> None:
    ours, theirs = normscope.BatchNorm2d(3).double(), torch.nn.BatchNorm2d(3).double()
    x, state = joined(4), dict(ours.state_dict())

    torch.func.functional_call(ours, {k: v.clone() for k, v in state.items()}, (x,))
    for transform in (torch.func.vmap(ours), torch.func.jacrev(ours)):
        with pytest.raises(RuntimeError, match=r"got \w+; use torch.autograd.grad .* or eval\(\)"):
            transform(x[None])

    assert ours.num_batches_tracked == 0
    ours.eval()
    theirs.eval()
    assert torch.equal(torch.func.vmap(ours)(x[None]), torch.func.vmap(theirs)(x[None]))
