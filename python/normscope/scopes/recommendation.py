# SPDX-License-Identifier: Apache-2.0
"""Measures which scope each layer needs."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from normscope._binding import groups, ops
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.forward import routed
from normscope.layers.scope import Scope
from normscope.models.selection import Patterns, layers_in_training
from normscope.scopes.noise import IndependentValues, WatchedLayer, gather
from normscope.scopes.plan import Candidate, LayerPlan, ScopePlan
from normscope.training.measuring import measuring
from normscope.training.running_stats import check_agreement, length_of, peers_told

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NamedLayers = list[tuple[str, BatchNorm]]

# The default number of independent values; docs/recommending.md explains the choice.
DEFAULT_INDEPENDENT_VALUES = 4.0


def recommend_scopes(
    model: torch.nn.Module,
    batches: Iterable[Any],
    independent_values: float = DEFAULT_INDEPENDENT_VALUES,
    *,
    ranks: int | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    process_group: ProcessGroup | None = None,
) -> ScopePlan:
    """Measure which scope each layer needs, to find the layers that have to synchronize.

    The model runs forward over a few batches on all ranks, with the measured layers under scope
    ``world`` and without gradients. These are the layers of normscope in training, or those that
    ``include`` names. The moments of the ranks yield an estimate of how many independent values
    a channel's statistics are worth under each scope. A layer gets the narrowest scope that reaches
    the wanted number: ``local``, ``group:K`` for K that divide the number of ranks (``node`` if
    each host has K ranks), or ``world``. If the 90 % interval of a scope extends below the wanted
    number, the next wider scope is used. All ranks get the same plan.

    The model is not changed, even if this function raises: parameters, buffers, modes, scopes,
    ``elements_seen`` and the state of random number generators stay the same. The measured layers
    run with batch statistics, all other modules in their current mode: a frozen layer, which is in
    evaluation, normalizes with its running statistics.

    Args:
        model: A model with layers of normscope (for DistributedDataParallel, its ``module``), at
            the start of the training or later.
        batches: Inputs of the model as in training, four to sixteen, the same number on every rank.
            A tuple holds the arguments of a forward. Each batch is requested after the one before
            is done: a generator can load them, and ``tqdm(batches)`` shows the progress.
        independent_values: The number that a norm batch should be worth, at least 2.
        ranks: With a single process, the number of ranks to plan for; parts of each batch stand for
            their batches.
        include: Patterns of qualified names, as for :func:`convert`, also of layers in evaluation.
            None for all layers in training.
        exclude: As for :func:`convert`.
        process_group: The ranks; None for the default group, or for this process alone if there is
            none.

    Returns:
        The plan, the same on every rank.

    Raises:
        ValueError: If the wanted number is below 2 or NaN, there is no batch, the model has no
            layer of normscope to measure, a pattern matches none, the ranks differ in layers or in
            the number of batches, or a batch has fewer samples than parts. No rank hangs in these
            cases.

    Example:
        >>> from normscope import BatchNorm1d
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), BatchNorm1d(8))
        >>> batches = [torch.randn(64, 4) for _ in range(16)]
        >>> plan = recommend_scopes(model, batches, independent_values=8, ranks=2)
        >>> plan.apply(model)
        >>> str(model[1].scope)
        'local'
    """
    group = groups.in_use(process_group)
    with peers_told(group):
        if not independent_values >= 2:
            raise ValueError(f"independent_values: expected at least 2, got {independent_values}")
        parts = _parts(ranks, group)
        layers = _layers_to_choose_for(model, include, exclude)
        length = length_of(batches)
    hosts = [0] * (1 if parts is None else parts)
    if group is not None and group.size() > 1:
        check_agreement("recommend_scopes", layers, group, length)
        hosts = _hosts(group, independent_values)
    watches = [WatchedLayer(name, layer, parts) for name, layer in layers]
    count = _run(model, watches, batches, group)
    if count == 0:
        raise ValueError("batches: expected at least one, got none")
    if group is not None and group.size() > 1:
        for watch in watches:
            gather(watch, group)
    plans = [_plan(watch, independent_values, hosts) for watch in watches if watch.calls]
    plan = ScopePlan(tuple(plans), float(independent_values), len(hosts), count)
    if group is None or group.rank() == 0:
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


def _parts(ranks: int | None, group: ProcessGroup | None) -> int | None:
    if ranks is None:
        return None
    if group is not None and group.size() > 1:
        raise ValueError(
            f"ranks: expected None, since the process group has {group.size()}, got {ranks}"
        )
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    return ranks


def _run(
    model: torch.nn.Module,
    watches: list[WatchedLayer],
    batches: Iterable[Any],
    group: ProcessGroup | None,
) -> int:
    """Run the model over the batches, watch the layers, and return the number of batches."""
    count = 0
    with ExitStack() as stack:
        stack.enter_context(_left_as_it_is(model))
        stack.enter_context(measuring(model, [watch.layer for watch in watches]))
        for watch in watches:
            watch.layer.scope = Scope.world()
            stack.enter_context(routed(watch.layer, watch))
        for batch in _as_on_all_ranks(batches, group):
            for watch in watches:
                watch.calls_of_batch = 0
            with peers_told(group):
                model(*batch) if isinstance(batch, tuple) else model(batch)
            count += 1
    return count


_NO_BATCH = object()


def _as_on_all_ranks(batches: Iterable[Any], group: ProcessGroup | None) -> Iterator[Any]:
    """Yield the batches lazily, as long as every rank has one."""
    with peers_told(group):
        left = iter(batches)
    count = 0
    while True:
        with peers_told(group):
            batch = next(left, _NO_BATCH)
        if group is not None and group.size() > 1:
            own = torch.tensor([float(batch is not _NO_BATCH)], dtype=torch.float64)
            have = ops.gather(own, group.group_name, "recommend_scopes, next batch")
            without = [rank for rank, one in enumerate(have.flatten().tolist()) if one == 0]
            if 0 < len(without) < group.size():
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


def _hosts(group: ProcessGroup, wanted: float) -> list[int]:
    """Return a number for each rank that is the same for all ranks of a host."""
    own = torch.tensor([ops.host_identity(), wanted], dtype=torch.float64)  # of 52 bits
    hosts, numbers = ops.gather(own, group.group_name, "recommend_scopes, hosts").T.tolist()
    if len(set(numbers)) > 1:
        raise ValueError(
            f"independent_values: expected the same number on every rank, got {numbers}"
        )
    return [int(host) for host in hosts]


def _plan(watch: WatchedLayer, wanted: float, hosts: list[int]) -> LayerPlan:
    layer = watch.layer
    chosen, scopes, ranks, values = ops.choose_scope(
        watch.name, [moments.rows for moments in watch.calls], layer.eps, wanted, hosts
    )
    candidates = tuple(
        Candidate(
            scope,
            size,
            None if math.isnan(fields[0]) else IndependentValues(*fields[:4]),
            bool(fields[4]),
        )
        for scope, size, fields in zip(scopes, ranks, values.tolist(), strict=True)
    )
    return LayerPlan(
        watch.name,
        layer.num_features,
        scopes[chosen],
        candidates,
        ops.message_bytes(layer.num_features),
        watch.seconds / watch.exchanges if watch.exchanges else None,
    )
