# SPDX-License-Identifier: Apache-2.0
"""accumulate: several batches update running statistics once, with the bits of a single batch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from replicas import replicas_of, run_replicas
from torch import nn

import normscope

pytestmark = pytest.mark.on_device

MICRO_BATCHES = (3, 1, 0, 4)


def buffers_of(layer: normscope.BatchNorm) -> dict[str, Any]:
    return {name: value.clone() for name, value in layer.named_buffers()} | {
        "elements_seen": layer.elements_seen
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(a, expected[name]) if isinstance(a, torch.Tensor) else a == expected[name]
        for name, a in found.items()
    )


def accumulate(model: nn.Module, batches: Iterable[torch.Tensor] = ()) -> None:
    with normscope.accumulate(model):
        for batch in batches:
            model(batch)


def expect_equal_running_statistics(
    layer: normscope.BatchNorm, expected: normscope.BatchNorm
) -> None:
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(layer, name), getattr(expected, name), rtol=0, atol=0)


@pytest.mark.own_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_accumulated_batches_have_the_bits_of_one_batch(
    dtype: torch.dtype, memory_format: torch.memory_format, momentum: float | None
) -> None:
    x = (1e3 + torch.randn(sum(MICRO_BATCHES), 5, 7, 3)).to(dtype).to(memory_format=memory_format)
    layer = normscope.BatchNorm2d(5, momentum=momentum, dtype=dtype)
    layer(torch.randn(2, 5, 3, 3, dtype=dtype))
    joined = copy.deepcopy(layer)
    before = buffers_of(layer)

    with normscope.accumulate(layer):
        for part in x.split(list(MICRO_BATCHES)):
            layer(part)
            assert same(buffers_of(layer), before)
    joined(x)

    assert not same(buffers_of(layer), before)
    assert same(buffers_of(layer), buffers_of(joined))


def test_a_block_without_a_forward_changes_nothing() -> None:
    layer = normscope.BatchNorm1d(3)
    before = buffers_of(layer)
    with normscope.accumulate(layer):
        layer.eval()(torch.randn(4, 3))
    assert same(buffers_of(layer), before)


@pytest.mark.own_kernels
def test_layers_accumulate_in_exact_graphs() -> None:
    x = torch.randn(6, 3, 4)
    layer, joined = normscope.BatchNorm1d(3), normscope.BatchNorm1d(3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with normscope.training.exact_graphs():
        compiled(x[:2])
        joined(x[:2])
        for _ in range(2):
            with normscope.accumulate(layer):
                for part in (x[:2], x[2:4], x[4:]):
                    compiled(part).sum().backward()
            joined(x)
    expect_equal_running_statistics(layer, joined)
    assert layer.elements_seen is None


@contextmanager
def no_momentum(layer: nn.Module) -> Iterator[None]:
    """Switch updates off as SAM (Foret et al. 2021) does for its second forward."""
    momentum, layer.momentum = layer.momentum, 0  # type: ignore[assignment]
    yield
    layer.momentum = momentum


@contextmanager
def no_tracking(layer: nn.Module) -> Iterator[None]:
    """Switch updates off as virtual adversarial training does."""
    layer.track_running_stats = False  # type: ignore[assignment]
    yield
    layer.track_running_stats = True  # type: ignore[assignment]


@contextmanager
def no_buffers(layer: nn.Module) -> Iterator[None]:
    buffers = dict(layer._buffers)
    layer._buffers.update(dict.fromkeys(buffers))
    yield
    layer._buffers.update(buffers)


def call(layer: nn.Module, x: torch.Tensor) -> None:
    layer(x)


def call_with_mask(layer: nn.Module, x: torch.Tensor) -> None:
    layer(x, mask=x[:, :1] > -1)


def call_with_gradient(layer: nn.Module, x: torch.Tensor) -> None:
    layer(x.requires_grad_()).sum().backward()


def call_compiled(layer: nn.Module, x: torch.Tensor) -> None:
    torch.compiler.reset()  # rather than to reach the limit of recompilations
    torch.compile(layer, backend="eager", fullgraph=True)(x)


def call_replicas(layer: nn.Module, x: torch.Tensor) -> None:
    for y in run_replicas(replicas_of(layer, 2), x.chunk(2)):
        assert isinstance(y, torch.Tensor), y


def call_masked_replicas(layer: nn.Module, x: torch.Tensor) -> None:
    replicas = [partial(call_with_mask, replica) for replica in replicas_of(layer, 2)]
    assert run_replicas(replicas, x.chunk(2)) == [None, None]


@pytest.mark.parametrize("switch", [no_momentum, no_tracking, no_buffers])
@pytest.mark.parametrize(
    "run",
    [
        call,
        call_with_mask,
        call_with_gradient,
        call_compiled,
        call_replicas,
        call_masked_replicas,
    ],
)
def test_a_call_that_would_not_update_alone_is_not_of_the_block(
    switch: Callable[[nn.Module], AbstractContextManager[None]],
    run: Callable[[nn.Module, torch.Tensor], None],
) -> None:
    clean, other = torch.randn(2, 4, 3, 5), 5 + 10 * torch.randn(2, 4, 3, 5)
    states = []
    for with_others in (True, False):
        layer = normscope.BatchNorm1d(3, scope="slices:2")
        with normscope.accumulate(layer):
            for x, z in zip(clean.clone(), other.clone(), strict=True):
                for is_on in (False, True, False):
                    if is_on:
                        run(layer, x)
                    elif with_others:
                        with switch(layer):
                            run(layer, z)
        states.append(buffers_of(layer))

    assert same(*states)
    assert states[0]["num_batches_tracked"] == 1


@pytest.mark.own_kernels
def test_the_update_has_the_momentum_of_the_calls() -> None:
    x = torch.randn(4, 3)
    layer, expected = normscope.BatchNorm1d(3), normscope.BatchNorm1d(3)
    expected(x)

    layer.momentum = 0
    with normscope.accumulate(layer):
        layer(x + 1)
        layer.momentum = 0.1
        layer(x)
        layer.momentum = 0
    layer.momentum = 0.1

    assert same(buffers_of(layer), buffers_of(expected))


def test_calls_with_other_tensors_of_the_same_memory_accumulate() -> None:
    layer = normscope.BatchNorm1d(3)
    same_memory = {name: value.detach() for name, value in layer.named_buffers()}

    with normscope.accumulate(layer):
        torch.func.functional_call(layer, same_memory, torch.randn(4, 3))
    assert layer.num_batches_tracked == 1


def test_layers_without_buffers_train_as_in_torch() -> None:
    x = torch.randn(4, 3)
    model = nn.Sequential(normscope.BatchNorm1d(3), normscope.BatchNorm1d(3))
    without_buffers(model)

    with normscope.accumulate(model):
        y = model[0](x)
        model(x)

    torch.testing.assert_close(y, nn.BatchNorm1d(3)(x))
    assert model[0].running_mean is None
    assert model[1].num_batches_tracked == 1


def twin(layer: normscope.BatchNorm) -> normscope.BatchNorm:
    """Return an object with the same __dict__."""
    other: normscope.BatchNorm = normscope.BatchNorm1d.__new__(normscope.BatchNorm1d)
    object.__setattr__(other, "__dict__", vars(layer))
    return other


@pytest.mark.own_kernels
@pytest.mark.parametrize("copied", [twin, copy.copy])
def test_layers_that_share_statistics_update_them_once(
    copied: Callable[[normscope.BatchNorm], normscope.BatchNorm],
) -> None:
    x = torch.randn(6, 3)
    layer, joined = normscope.BatchNorm1d(3), normscope.BatchNorm1d(3)
    other = copied(layer)
    joined(x)

    with normscope.accumulate(nn.ModuleList([layer, other])):
        layer(x[:2])
        other(x[2:])

    expect_equal_running_statistics(layer, joined)
    expect_equal_running_statistics(other, joined)
    other(x)
    assert layer.num_batches_tracked == 2


def without_buffers(model: nn.Sequential) -> None:
    model[0].register_buffer("running_mean", None)
    model[0].register_buffer("running_var", None)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "reverted": normscope.revert,
    "reverted and converted": lambda model: normscope.convert(normscope.revert(model), "local"),
    "converted": lambda model: normscope.convert(model, "slices:1", fuse=True),
    "deployed": normscope.to_torch,
    "of another dtype": lambda model: model.double(),
    "without buffers": without_buffers,
    "replaced": lambda model: model.__setitem__(0, nn.Identity()),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("layer_class", [nn.BatchNorm1d, normscope.BatchNormAct1d])
def test_a_layer_that_changes_in_the_block_keeps_what_it_has_seen(
    how: str, layer_class: type[normscope.BatchNorm]
) -> None:
    x = torch.randn(6, 3)
    model = normscope.convert(nn.Sequential(layer_class(3, momentum=1.0), nn.ReLU()), "local")
    norm: Any = model[0]

    with normscope.accumulate(model):
        model(x[:4])
        model(x[4:])
        CHANGES[how](model)

    if how == "without buffers":
        assert norm.running_mean is None
        return
    torch.testing.assert_close(norm.running_mean.float(), x.mean(0))
    assert norm.num_batches_tracked == 1
    for module in (norm, *model.modules(), *copy.deepcopy(model).modules()):
        assert "_route" not in vars(module)
    last = torch.randn(4, 3).type_as(norm.running_mean)
    model(last)
    if how != "replaced":
        torch.testing.assert_close(norm.running_mean, last.mean(0))


def test_copies_do_not_accumulate() -> None:
    layer = normscope.BatchNorm1d(3)
    with normscope.accumulate(layer):
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        other(torch.randn(4, 3))
        assert other.num_batches_tracked == 1


def test_layers_of_torch_are_not_affected() -> None:
    theirs, ours = nn.BatchNorm1d(3), normscope.BatchNorm1d(3)
    accumulate(nn.Sequential(theirs, ours), torch.randn(2, 4, 3))
    assert theirs.num_batches_tracked == 2
    assert ours.num_batches_tracked == 1


def test_a_refused_block_leaves_the_one_around_it() -> None:
    layer = normscope.BatchNorm1d(3)
    with normscope.accumulate(layer):
        with pytest.raises(RuntimeError, match="0: expected a layer outside of other blocks"):
            accumulate(nn.Sequential(layer))
        layer(torch.randn(4, 3))
    assert layer.num_batches_tracked == 1
