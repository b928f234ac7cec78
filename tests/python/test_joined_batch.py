# SPDX-License-Identifier: Apache-2.0
"""Ranks with unequal batches train like torch.nn's layers on the joined batch, in float64."""

import pytest
import torch
from oracle import LAYERS, OURS
from rank_pool import RankPool, split_of
from torch import distributed

pytestmark = pytest.mark.on_device

STEPS = 5

# Relative to the largest entry. Both sides compute in float64 (eps 2e-16), condition number one.
RELATIVE = 1e-10

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

Tensors = dict[str, torch.Tensor]


def batch(shape: tuple[int, ...], step: int, last: bool) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: FBT001
    """Return the joined input of a step, with a nonzero mean, and the gradient of its output."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 7
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    if last:
        return tuple(t.to(memory_format=CHANNELS_LAST[len(shape)]) for t in (x, dy))  # type: ignore[return-value]
    return x, dy


def train(
    layer: torch.nn.Module, shape: tuple[int, ...], part: slice, *, last: bool, sums: bool
) -> Tensors:
    """Run five optimizer steps on this part of the joined batches."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    seen: Tensors = {}
    for step in range(STEPS):
        x, dy = (t[part] for t in batch(shape, step, last))
        x = x.requires_grad_()
        y = layer(x)
        y.backward(dy)
        assert x.grad is not None
        assert y.stride() == x.stride() == x.grad.stride()
        seen |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            if sums:
                distributed.all_reduce(parameter.grad)
            seen[f"d{name}{step}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return seen | {f"state.{k}": v.clone() for k, v in layer.state_dict().items()}


def train_rank(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    last: bool,  # noqa: FBT001
) -> Tensors:
    layer = OURS[len(shape)](shape[1], dtype=torch.float64)
    part = split_of(sizes, distributed.get_rank())
    return train(layer, shape, part, last=last, sums=True)


@pytest.mark.parametrize(
    ("sizes", "extent", "last"),
    [
        ((2, 5), (4, 5), False),
        ((5, 2), (4, 5), True),
        ((1, 2, 6), (3, 3), True),
        ((4, 1, 2, 3), (6,), False),
        ((3, 1, 4), (), False),
        ((1, 2), (2, 3, 4), False),
        ((2, 1), (2, 3, 4), True),
    ],
)
def test_ranks_train_like_torch_on_the_joined_batch(
    ranks: RankPool, sizes: tuple[int, ...], extent: tuple[int, ...], *, last: bool
) -> None:
    shape = (sum(sizes), 3, *extent)
    layer = LAYERS[len(shape)](3, dtype=torch.float64)
    expected = train(layer, shape, slice(None), last=last, sums=False)

    answers = ranks.run(len(sizes), train_rank, shape, sizes, last)

    for rank, got in enumerate(answers):
        assert got.keys() == expected.keys()
        for name, value in got.items():
            is_of_samples = name.startswith(("y", "dx"))
            wanted = expected[name][split_of(sizes, rank)] if is_of_samples else expected[name]
            allowed = RELATIVE * expected[name].abs().amax().item()
            torch.testing.assert_close(value, wanted, rtol=0, atol=allowed, msg=name)
