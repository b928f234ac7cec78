# SPDX-License-Identifier: Apache-2.0
"""Measures which scope each layer needs."""

from __future__ import annotations

import itertools
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from normscope._binding import groups, ops
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.forward import routed
from normscope.layers.scope import Scope
from normscope.models.selection import Patterns, layers_in_training
from normscope.scopes.noise import (
    DEFAULT_NOISE,
    Shares,
    WatchedLayer,
    differentiable_outputs,
    measure_batch,
)
from normscope.scopes.plan import Candidate, LayerPlan, ScopePlan
from normscope.training.measuring import call_model, measuring
from normscope.training.running_stats import check_agreement, length_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

NamedLayers = list[tuple[str, BatchNorm]]

# A bar shows the progress of measurements that take longer.
_SECONDS_WITHOUT_BAR = 5.0


def recommend_scopes(
    model: torch.nn.Module,
    batches: Iterable[Any],
    noise: float = DEFAULT_NOISE,
    *,
    ranks: int | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    process_group: ProcessGroup | DeviceMesh | None = None,
) -> ScopePlan:
    """Measure which layers have to synchronize, in a model that has begun to train.

    Narrower statistics than those of all ranks add noise to the outputs of the model. One forward
    and one backward for each batch measure this noise for every layer and scope. The plan gives
    ``world`` to the layers that add most noise per byte, until what the others add is at most
    ``noise`` of the variance of the outputs. The others get ``local``, or ``node`` if there are
    several hosts and the noise allows it. A norm batch of a single sample, or of fewer than 8
    elements per channel, is never chosen for a narrower scope.

    The noise of initial weights says little about that of training. Train with scope ``world`` for
    some hundred steps or an epoch, then call this function. Layers with fewer than 50 updates of
    their running statistics get ``world``. docs/recommending.md shows what plans are worth.

    The model is not changed, even if this function raises: parameters, gradients, buffers, modes,
    scopes, ``elements_seen`` and the state of random number generators stay the same. The measured
    layers run with batch statistics, all other modules in their current mode: a frozen layer, which
    is in evaluation, normalizes with its running statistics. It needs about the memory of a step.

    Args:
        model: A model with layers of normscope (for DistributedDataParallel, its ``module``).
        batches: Inputs of the model as in training, four to sixteen, the same number on every rank.
            A tuple holds the arguments of a forward, a mapping its keyword arguments. Each batch is
            requested after the one before is done, so a generator can load them. If tqdm is
            installed, a bar shows the progress of a measurement in a terminal.
        noise: The share of the outputs' variance that all narrower statistics together may add.
            0 gives every layer ``world``. With a 95 % interval over the batches, so more batches
            allow more narrow scopes. The outputs are all tensors with a gradient that the model
            returns, and both parts of complex ones; a scalar, such as a loss, counts as if it
            varied by a tenth of its value.
        ranks: With a single process, the number of ranks to plan for; parts of each batch stand for
            their batches.
        include: Patterns of qualified names, as for :func:`convert`, also of layers in evaluation.
            None for all layers in training.
        exclude: As for :func:`convert`.
        process_group: The ranks, or a mesh of one dimension; None for the default group, or for
            this process alone if there is none.

    Returns:
        The plan, the same on every rank.

    Raises:
        ValueError: If ``noise`` is negative or NaN, there is no batch, the model has no layer of
            normscope to measure, it returns no tensor with a gradient, a pattern matches none, the
            ranks differ in layers or in the number of batches, or a batch has fewer samples than
            parts. No rank hangs in these cases.

    Example:
        >>> from normscope import BatchNorm1d
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), BatchNorm1d(8), torch.nn.ReLU())
        >>> batches = [torch.randn(256, 4) for _ in range(60)]
        >>> for batch in batches:  # the training
        ...     _ = model(batch)
        >>> plan = recommend_scopes(model, batches[:16], ranks=2)
        >>> plan.apply(model)
        >>> str(model[1].scope)
        'local'
    """
    group = groups.name_in_use(groups.name_of(process_group))
    with ops.notifying_peers("world", group, Exception):
        if not noise >= 0:
            raise ValueError(f"noise: expected at least 0, got {noise}")
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise ValueError(
                f"model: expected the model in the {type(model).__name__}, got the wrapper; pass "
                "model.module"
            )
        parts = _parts(ranks, groups.size_of(process_group))
        layers = _layers_to_choose_for(model, include, exclude)
        length = length_of(batches)
    check_agreement("recommend_scopes", layers, group, length)
    shares = Shares(group, groups.rank_in(process_group), parts, _hosts(group, noise) * parts)
    watches = [WatchedLayer(name, layer) for name, layer in layers]
    count = _run(model, watches, batches, shares)
    if count == 0:
        raise ValueError("batches: expected at least one, got none")
    plan = _plan(watches, noise, shares, count)
    # One rank shows them. Where a warning is an error, all ranks raise it.
    with nullcontext() if shares.first == 0 else warnings.catch_warnings(record=True):
        for text in plan.warnings:
            warnings.warn(text, stacklevel=2)
    return plan


def _layers_to_choose_for(
    model: torch.nn.Module, include: Patterns | None, exclude: Patterns | None
) -> NamedLayers:
    """Return the layers of normscope that are measured."""
    layers = layers_in_training(model, BatchNorm, include, exclude)
    if not layers:
        raise ValueError(
            "model: expected layers of normscope in training, got "
            f"{type(model).__qualname__} without; normscope.convert makes them, and include "
            "selects those in evaluation"
        )
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"model: expected one that knows its shapes, got {name} without a shape; run it "
                "once"
            )
    return layers


def _parts(ranks: int | None, size: int) -> int:
    if ranks is None:
        return 1
    if size > 1:
        raise ValueError(f"ranks: expected None, since the process group has {size}, got {ranks}")
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    return ranks


def _run(
    model: torch.nn.Module, watches: list[WatchedLayer], batches: Iterable[Any], shares: Shares
) -> int:
    """Run the model over the batches, measure the layers, and return the number of batches."""
    count = 0
    with ExitStack() as stack:
        with shares.notifying_peers():
            stack.enter_context(_left_as_it_is(model))
            stack.enter_context(measuring(model, [watch.layer for watch in watches]))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for watch in watches:
            watch.layer.scope = Scope.world()
            stack.enter_context(routed(watch.layer, watch))
        for batch in _with_progress(_as_on_all_ranks(batches, shares), batches, shares):
            with shares.notifying_peers():
                outputs = _outputs(model, batch)
                _check_samples(watches, shares)
            _check_calls(watches, shares)
            with shares.notifying_peers():
                measure_batch(watches, outputs, count, shares)
            count += 1
    return count


def _outputs(model: torch.nn.Module, batch: Any) -> list[torch.Tensor]:  # noqa: ANN401
    outputs = differentiable_outputs(call_model(model, batch))
    if not outputs:
        raise ValueError(
            "model: expected outputs with a gradient, whose noise can be measured, got none; the "
            "model must return floating-point tensors that it computes with gradients"
        )
    return outputs


def _check_samples(watches: list[WatchedLayer], shares: Shares) -> None:
    for watch in watches:
        for call in watch.calls:
            if len(call.x) < shares.parts and shares.parts > 1:
                raise ValueError(
                    f"batches: expected at least {shares.parts} samples, one for each rank, got "
                    f"{len(call.x)} in {watch.label}"
                )


def _check_calls(watches: list[WatchedLayer], shares: Shares) -> None:
    """Raise on all ranks unless every layer ran as often on each of them."""
    own = [float(len(watch.calls)) for watch in watches]
    for watch, *of_ranks in zip(watches, *shares.gather_numbers(own, "calls"), strict=True):
        if len(set(of_ranks)) > 1:
            raise ValueError(
                f"model: expected {watch.label} to run as often on every rank, got "
                f"{[int(each) for each in of_ranks]} times"
            )


def _with_progress(batches: Iterator[Any], given: Iterable[Any], shares: Shares) -> Iterable[Any]:
    """Show a bar on the first rank, if the measurement takes long and tqdm is installed."""
    if shares.first != 0 or not sys.stderr.isatty():
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    total = length_of(given)
    bar: Iterable[Any] = tqdm(
        batches,
        "recommend_scopes",
        total=None if total < 0 else total,
        unit=" batches",
        delay=_SECONDS_WITHOUT_BAR,
        leave=False,
    )
    return bar


_NO_BATCH = object()


def _as_on_all_ranks(batches: Iterable[Any], shares: Shares) -> Iterator[Any]:
    """Yield the batches lazily, as long as every rank has one."""
    with shares.notifying_peers():
        left = iter(batches)
    count = 0
    while True:
        with shares.notifying_peers():
            batch = next(left, _NO_BATCH)
        have = shares.gather_numbers([float(batch is not _NO_BATCH)], "next batch")
        without = [rank for rank, one in enumerate(have) if one == [0]]
        if 0 < len(without) < len(have):
            raise ValueError(
                "batches: expected the same number on every rank, since layers synchronize, "
                f"got {count} on ranks {without} and more on the others"
            )
        if batch is _NO_BATCH:
            return
        count += 1
        yield batch


@contextmanager
def _left_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Restore random numbers, and what this module or a forward sets on layers of normscope."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    kept = [(norm.scope, norm.layer_name) for norm in norms]
    devices: dict[str, set[int]] = {}
    for parameter in model.parameters():
        if parameter.get_device() >= 0:
            devices.setdefault(parameter.device.type, set()).add(parameter.get_device())
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([]))
            for device_type, indices in devices.items():
                stack.enter_context(torch.random.fork_rng(indices, device_type=device_type))
            yield
    finally:
        for norm, (scope, layer_name) in zip(norms, kept, strict=True):
            norm.scope, norm.layer_name = scope, layer_name


def _hosts(group: str, noise: float) -> tuple[int, ...]:
    """Return a number for each rank that is the same for all ranks of a host."""
    own = [ops.settings().host, noise]
    of_ranks = ops.gather_numbers(own, group, "recommend_scopes, hosts")
    hosts, numbers = zip(*of_ranks, strict=True)
    if len(set(numbers)) > 1:
        raise ValueError(f"noise: expected the same number on every rank, got {list(numbers)}")
    return tuple(int(host) for host in hosts)


def _plan(watches: list[WatchedLayer], allowed: float, shares: Shares, count: int) -> ScopePlan:
    """Choose the scopes; a collective."""
    watches = [watch for watch in watches if watch.noise]
    exchange_bytes = [ops.message_bytes(watch.layer.num_features) for watch in watches]
    updates = [watch.layer.num_batches_tracked for watch in watches]
    scopes, ranks, *of_layers, noise, standard_error = ops.choose_scopes(
        [watch.name for watch in watches],
        exchange_bytes,
        [math.inf if each is None else float(each) for each in updates],
        [watch.seconds / watch.exchanges if watch.exchanges else math.nan for watch in watches],
        [torch.stack(watch.noise) for watch in watches],
        count,
        allowed,
        shares.group,
        shares.hosts,
    )
    layers = tuple(
        LayerPlan(
            watch.name,
            watch.layer.num_features,
            scopes[chosen],
            tuple(
                Candidate(scope, size, of_scope, int(samples), int(elements))
                for scope, size, (of_scope, samples, elements) in zip(
                    scopes, ranks, measured.tolist(), strict=True
                )
            ),
            None if math.isinf(fewest_updates) else int(fewest_updates),
            size,
            None if math.isnan(seconds) else seconds,
        )
        for watch, size, measured, fewest_updates, seconds, chosen in zip(
            watches, exchange_bytes, *of_layers, strict=True
        )
    )
    return ScopePlan(layers, float(allowed), noise, standard_error, len(shares.hosts), count)
