# SPDX-License-Identifier: Apache-2.0
"""Common running statistics for all ranks, if the scope is narrower than the world."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_parallel import data_parallel
from rank_pool import RankPool, split_of
from refusals import unchanged
from torch import distributed, nn

import normscope

pytestmark = pytest.mark.on_device

Tensors = dict[str, torch.Tensor]

SIZES = (3, 1, 4)

# About a hundred roundings in float64 (eps 2e-16), condition number one.
ROUNDING = 1e-12

MOMENTS = ("mean", "var")


def network(scope: str, *, momentum: float | None = 0.3) -> nn.Sequential:
    """Return a network with layers of normscope and of torch, in float64 to avoid rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 1),
        nn.BatchNorm2d(4, momentum=momentum),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.BatchNorm2d(3, track_running_stats=False),
    ).double()
    return normscope.convert(net, scope, exclude="4")


def images(samples: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x + torch.arange(samples, dtype=torch.float64).view(-1, 1, 1, 1)


def part(seed: int = 0) -> torch.Tensor:
    """Return this rank's samples of a joined batch."""
    return images(sum(SIZES), seed)[split_of(SIZES, distributed.get_rank())]


def assert_same_bits(states: list[Tensors]) -> None:
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][name]) for name, value in other.items())


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=ROUNDING, atol=ROUNDING)


def law_of_total_variance(
    means: torch.Tensor, variances: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool means and variances [ranks, C] over the first dimension."""
    w = (weights.double() / weights.sum())[:, None]
    mean = (w * means).sum(0)
    return mean, (w * (variances + (means - mean).square())).sum(0)


def train_and_pool() -> tuple[Tensors, Tensors]:
    model = network("local")
    for step in range(2):
        model(part(step))
    before = copy.deepcopy(model.state_dict())
    normscope.sync_running_stats(model)
    return before, model.state_dict()


def test_pooled_statistics_follow_the_law_of_total_variance(ranks: RankPool) -> None:
    answers = ranks.run(3, train_and_pool)

    for name, weights in (("1", torch.tensor(SIZES)), ("4", torch.ones(3))):
        before = [torch.stack([b[f"{name}.running_{s}"] for b, _ in answers]) for s in MOMENTS]
        mean, var = law_of_total_variance(before[0], before[1], weights)
        for _, after in answers:
            assert_near(after[f"{name}.running_mean"], mean)
            assert_near(after[f"{name}.running_var"], var)
    assert_same_bits([after for _, after in answers])
    assert answers[0][1]["1.num_batches_tracked"] == 2


def test_without_other_ranks_nothing_is_pooled() -> None:
    model = network("local")
    model(images(4))

    with unchanged(model):
        normscope.sync_running_stats(model)


def means_under_data_parallel(buffers: str) -> list[float]:
    """Return running means of two steps with momentum 1/2; rank r always sees the value r + 1."""
    layer = normscope.BatchNorm1d(1, momentum=0.5, scope="local")
    parallel = data_parallel(layer, sends_buffers=buffers == "sent")
    for _ in range(2):
        parallel(torch.full((2, 1), distributed.get_rank() + 1.0))
    means = [layer.get_buffer("running_mean").item()]
    normscope.sync_running_stats(parallel)
    parallel.eval()(torch.zeros(2, 1))
    return [*means, layer.get_buffer("running_mean").item()]


def test_data_parallel_broadcasts_the_statistics_of_rank_0(ranks: RankPool) -> None:
    own = ranks.run(2, means_under_data_parallel, "own")
    default = ranks.run(2, means_under_data_parallel, "sent")

    # 0 -> v/2 -> 3v/4 on each rank; by default, rank 1 continues from rank 0's mean of 1/2.
    assert own == [[0.75, 1.125], [1.5, 1.125]]
    assert default == [[0.75, 1.0], [1.25, 1.0]]


def estimate(scope: str, counts: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensors, Any]:
    """Estimate from this rank's batches; return the statistics, and the inputs of each layer."""
    rank = distributed.get_rank()
    model = network(scope).to(dtype)
    model[1].eval()
    tracked = copy.deepcopy(model.state_dict())
    inputs: dict[str, list[torch.Tensor]] = {"1": [], "4": []}
    hooks = [
        model[int(name)].register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0]))
        for name, seen in inputs.items()
    ]
    batches = [images(SIZES[rank], seed=10 * rank + i).to(dtype) for i in range(counts[rank])]
    normscope.estimate_running_stats(model, batches, include="*")
    for hook in hooks:
        hook.remove()
    assert [layer.training for layer in model] == [True, False, True, True, True, True]
    after = model.state_dict()
    for name in ("1", "4"):
        key = f"{name}.num_batches_tracked"
        assert torch.equal(after[key], tracked[key])
    return after, inputs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("scope", "counts"), [("world", (2, 2, 2)), ("local", (2, 0, 3)), ("slices:2", (1, 1, 1))]
)
def test_estimates_are_those_of_a_single_batch_of_all_inputs(
    ranks: RankPool, scope: str, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    answers = ranks.run(3, estimate, scope, counts, dtype)

    assert_same_bits([after for after, _ in answers])
    for name in ("1", "4"):
        x = torch.cat([x for _, inputs in answers for x in inputs[name]]).double()
        # The moments are accurate to float64; storing them in the buffer rounds once.
        relative = max(ROUNDING, torch.finfo(dtype).eps)
        for after, _ in answers:
            mean, var = (after[f"{name}.running_{s}"].double() for s in MOMENTS)
            torch.testing.assert_close(mean, x.mean((0, 2, 3)), rtol=relative, atol=ROUNDING)
            torch.testing.assert_close(var, x.var((0, 2, 3)), rtol=relative, atol=ROUNDING)


def test_the_estimate_is_accurate_far_from_zero() -> None:
    layer = normscope.BatchNorm1d(2, dtype=torch.float64)
    batches = [torch.randn(50, 2, dtype=torch.float64) + 1e6 for _ in range(3)]

    normscope.estimate_running_stats(layer, batches)

    # Means of 1e6 are off by a few roundings of 1e6 * 2e-16 = 2e-10. So are their differences,
    # which contribute to a variance of order one. A sum of squares would be off by 2e-4.
    x = torch.cat(batches)
    torch.testing.assert_close(layer.get_buffer("running_var"), x.var(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(layer.get_buffer("running_mean"), x.mean(0), rtol=1e-15, atol=0)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = normscope.BatchNorm1d(1, momentum=None)
        self.unused = nn.BatchNorm1d(1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert not torch.is_grad_enabled()
        assert not self.dropout.training
        return self.norm(input=x), self.norm(y)


def test_tuples_are_arguments_and_each_call_of_a_shared_layer_counts() -> None:
    model = Pair().eval()
    batches = iter(
        [(torch.ones(2, 1), torch.zeros(2, 1)), (torch.ones(4, 1) * 2, torch.ones(2, 1))]
    )

    normscope.estimate_running_stats(model, batches, include="*")

    x = torch.tensor([1.0, 1, 0, 0, 2, 2, 2, 2, 1, 1])
    assert model.norm.get_buffer("running_mean") == x.mean()
    torch.testing.assert_close(model.norm.get_buffer("running_var")[0], x.var())
    assert model.norm.get_buffer("num_batches_tracked") == 0
    assert model.norm.elements_seen == 0
    assert model.unused.get_buffer("running_var") == 1  # without any elements


@pytest.mark.parametrize("layer_class", [nn.BatchNorm1d, normscope.BatchNorm1d])
def test_layers_that_share_statistics_get_those_of_all_their_inputs(
    layer_class: type[nn.BatchNorm1d],
) -> None:
    first, second = layer_class(1, affine=False), layer_class(1)
    second.running_mean, second.running_var = first.running_mean, first.running_var
    x = torch.tensor([[5.0], [7.0]])

    normscope.estimate_running_stats(nn.Sequential(first, second), [x])

    inputs = torch.cat([x, (x - 6) / (1 + 1e-5) ** 0.5])
    torch.testing.assert_close(first.get_buffer("running_mean")[0], inputs.mean())
    torch.testing.assert_close(first.get_buffer("running_var")[0], inputs.var())


def test_no_batches_keep_the_statistics() -> None:
    layer = normscope.BatchNorm1d(2)
    layer(torch.randn(4, 2))

    with unchanged(layer):
        normscope.estimate_running_stats(layer, [])


def failing_batches() -> Iterator[torch.Tensor]:
    yield images(4)
    raise OSError("no disk")


def test_an_error_does_not_change_modes_statistics_or_hooks() -> None:
    model = network("local")
    model[4].eval()
    model(images(4))
    hooks = len(model[1]._forward_pre_hooks)

    with unchanged(model), pytest.raises(OSError, match="no disk"):
        normscope.estimate_running_stats(model, failing_batches())

    assert len(model[1]._forward_pre_hooks) == hooks


def test_statistics_of_a_compiled_model_can_be_estimated() -> None:
    model = network("local")
    compiled: Any = torch.compile(model, backend="eager")
    compiled(images(4))

    normscope.estimate_running_stats(compiled, [images(4)])

    hidden = model[0](images(4)).detach()
    assert_near(model[1].get_buffer("running_mean"), hidden.mean((0, 2, 3)))
