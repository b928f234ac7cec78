# SPDX-License-Identifier: Apache-2.0
"""Running statistics of all ranks, where the scope is narrower than the world."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from normscope import _library, _process_group
from normscope._layers import input_of
from normscope._rows import unmasked_rows
from normscope.modules import BatchNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NamedLayers = list[tuple[str, _BatchNorm]]

_UNKNOWN = -1


def sync_running_stats(model: torch.nn.Module, process_group: ProcessGroup | None = None) -> None:
    """Pool the running statistics over the ranks, by the law of total variance.

        mean = sum(w * running_mean) / sum(w)
        var = sum(w * (running_var + (running_mean - mean)^2)) / sum(w)

    Where the scope is narrower than the world each rank has statistics of its own. After this call
    all ranks have the same, to the bit, so that one saved file evaluates alike everywhere; in
    torch.nn too. All layers of the model take part that have running statistics, those of torch.nn
    included, in an exchange each, after a check that the ranks have the same layers.

    w is ``elements_seen`` of a layer of normscope: what this rank has put into its statistics since
    the last pooling. All ranks weigh the same where that is not known on each of them (layers of
    torch.nn, compiled graphs) or no rank has seen an element. ``num_batches_tracked`` stays as it
    is. Where there is one rank or no process group there is nothing to do.

    DistributedDataParallel by default gives every rank the statistics of rank 0 before each
    forward, so that of the other ranks' no more than the last step's share is left to pool. Set
    ``forward_sync_buffers=False`` (before torch 2.13: ``broadcast_buffers=False``) where the scope
    is narrower than the world.

    Args:
        model: A model, the same on every rank.
        process_group: The ranks; None for the default group.

    Raises:
        ValueError: If the ranks have different layers with running statistics, or one is lazy and
            has seen no input.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> sync_running_stats(model)  # at the end of an epoch, before it is evaluated or saved
    """
    group = _process_group.in_use(process_group)
    if group is None or group.size() == 1:
        return
    with peers_told(group):
        layers = _layers_with_statistics(model)
    name = "sync_running_stats"
    check_agreement(name, layers, group)
    ranks = _gather(name, layers, [_running_moments(layer) for _, layer in layers], group)
    for (_, layer), *moments in zip(layers, *ranks, strict=True):
        pooled = reduce(_Moments.merged, _weighted(moments))
        _store(layer, pooled.mean, pooled.squares / pooled.count)


def estimate_running_stats(
    model: torch.nn.Module,
    batches: Iterable[Any],
    process_group: ProcessGroup | None = None,
) -> None:
    """Recompute the running statistics from data, as if all of it had been one batch.

    The model runs forward over the batches, without gradients; batch normalization with the
    statistics of the batches, over its scope, everything else in the mode that it is in. Each layer
    with running statistics, of normscope or torch.nn, then gets the mean and the unbiased variance
    of all the inputs that it had, over all batches and all ranks: the same bits on every rank.
    A layer that had no element keeps what it has, ``num_batches_tracked`` stays as it is.

    Layers whose scope is wider than a rank meet once a batch, so all ranks then need the same
    number of batches. That is checked where ``batches`` has a length on every rank; where it has
    none, ranks that wait for one that is done raise at the time limit of the process group.
    DistributedDataParallel's forward meets once a batch too: of such a model give ``model.module``.

    Args:
        model: A model, the same on every rank.
        batches: Inputs of the model. A tuple holds its arguments.
        process_group: The ranks; None for the default group, or for this process alone where there
            is none.

    Raises:
        ValueError: If the ranks have different layers with running statistics, one is lazy and has
            seen no input, or the numbers of batches differ. Nothing has changed then, nor when the
            model raises.

    Example:
        >>> layer = torch.nn.BatchNorm1d(1)
        >>> estimate_running_stats(layer, [torch.tensor([[1.0], [2.0]]), torch.tensor([[6.0]] * 2)])
        >>> layer.running_mean, layer.running_var
        (tensor([3.7500]), tensor([6.9167]))
    """
    group = _process_group.in_use(process_group)
    name = "estimate_running_stats"
    with peers_told(group):
        layers = _layers_with_statistics(model)
    if group is not None:
        check_agreement(name, layers, group, batch_count=_batch_count(model, batches))
    with peers_told(group):
        own = _moments_of_inputs(model, layers, batches)
    ranks = [own] if group is None else _gather(name, layers, own, group)
    for (_, layer), *moments in zip(layers, *ranks, strict=True):
        pooled = reduce(_Moments.merged, moments)
        if pooled.count > 0:
            _store(layer, pooled.mean, pooled.squares / (pooled.count - 1))


@dataclass
class _Moments:
    """Of the elements of each channel: number, mean [C], sum of squares about it [C], float64."""

    count: float
    mean: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> _Moments:
        """In two passes over x [N, C, *]."""
        channels = x.detach().double().transpose(0, 1).flatten(1)
        mean = channels.mean(1)
        return cls(channels.shape[1], mean, (channels - mean[:, None]).square().sum(1))

    def merged(self, other: _Moments) -> _Moments:
        """Of the elements of both (Chan et al. 1979); no element is neutral."""
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        delta = other.mean - self.mean
        return _Moments(
            count,
            self.mean + delta * (other.count / count),
            self.squares + other.squares + delta.square() * (self.count * other.count / count),
        )


def _layers_with_statistics(model: torch.nn.Module) -> NamedLayers:
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    for name, layer in layers:
        if is_lazy(layer.running_mean):  # type: ignore[arg-type]
            raise ValueError(
                f"{name or 'model'}: expected a layer with running statistics, got a "
                f"{type(layer).__name__} without input; run the model once"
            )
    return layers


@contextmanager
def peers_told(group: ProcessGroup | None) -> Iterator[None]:
    """An exception of this rank alone ends the wait of the others."""
    try:
        yield
    except _library.DistError:
        raise  # of an exchange: they know
    except Exception as error:
        if group is not None:
            reason = f"{type(error).__name__}: {error}"
            _library.fail_exchange("world", group.group_name, reason)
        raise


def check_agreement(
    name: str,
    layers: Sequence[tuple[str, _BatchNorm]],
    group: ProcessGroup,
    batch_count: int = _UNKNOWN,
) -> None:
    """All ranks raise where they would not exchange the same."""
    text = "".join(f"{layer_name} {layer.num_features}\n" for layer_name, layer in layers)
    # Of 48 bits, which a float64 holds.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    own = torch.tensor([digest, batch_count], dtype=torch.float64)
    all_ranks = _library.gather(own, group.group_name, f"{name}, agreement")
    digests, counts = all_ranks.long().T.tolist()
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise ValueError(
            "model: expected the same layers on every rank, got other names or channels on ranks "
            f"{others} than on rank 0"
        )
    if _UNKNOWN not in counts and len(set(counts)) > 1:
        raise ValueError(
            "batches: expected the same number on every rank, since layers synchronize, got "
            f"{counts}"
        )


def _batch_count(model: torch.nn.Module, batches: Iterable[Any]) -> int:
    """The number of batches where it is known and matters."""
    if not any(_spans_ranks(module) for module in model.modules()):
        return _UNKNOWN
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return _UNKNOWN


def _spans_ranks(module: torch.nn.Module) -> bool:
    if isinstance(module, BatchNorm):
        return str(module.scope).split(":")[0] not in ("local", "slices")
    return isinstance(module, torch.nn.SyncBatchNorm)


def _gather(
    name: str, layers: NamedLayers, own: list[_Moments], group: ProcessGroup
) -> list[list[_Moments]]:
    """The moments of all ranks, in rank order."""
    ranks: list[list[_Moments]] = [[] for _ in range(group.size())]
    for (layer, _), moments in zip(layers, own, strict=True):
        count = moments.mean.new_tensor([moments.count])
        message = torch.cat([count, moments.mean, moments.squares]).cpu()
        of_ranks = _library.gather(message, group.group_name, f"{name}, {layer or 'model'}")
        for rank, row in zip(ranks, of_ranks, strict=True):
            mean, squares = row[1:].chunk(2)
            rank.append(_Moments(row[0].item(), mean, squares))
    return ranks


def _running_moments(layer: _BatchNorm) -> _Moments:
    """A layer's running statistics, with the variance in place of squares."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    seen = layer.elements_seen if isinstance(layer, BatchNorm) else None
    return _Moments(
        _UNKNOWN if seen is None else seen, layer.running_mean.double(), layer.running_var.double()
    )


def _weighted(ranks: list[_Moments]) -> list[_Moments]:
    """Moments of as many elements as the ranks' statistics are worth."""
    weights = [moments.count for moments in ranks]
    if _UNKNOWN in weights or not any(weights):
        weights = [1.0] * len(ranks)
    return [_Moments(w, m.mean, m.squares * w) for w, m in zip(weights, ranks, strict=True)]


def _store(layer: _BatchNorm, mean: torch.Tensor, var: torch.Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(mean)
    layer.running_var.copy_(var)
    if isinstance(layer, BatchNorm):
        layer.elements_seen = 0


def _moments_of_inputs(
    model: torch.nn.Module, layers: NamedLayers, batches: Iterable[Any]
) -> list[_Moments]:
    """Run the model over the batches, and watch the layers' inputs."""
    seen = {layer: _no_elements(layer) for _, layer in layers}

    def watch(layer: _BatchNorm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, mask = input_of(layer, args, kwargs)
        counting = x if mask is None else unmasked_rows(x, mask)
        seen[layer] = seen[layer].merged(_Moments.of(counting))

    hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in seen]
    try:
        # A graph that was compiled before would not call the hooks.
        with batch_statistics(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in batches:
                model(*batch) if isinstance(batch, tuple) else model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return list(seen.values())


def _no_elements(layer: _BatchNorm) -> _Moments:
    assert layer.running_mean is not None
    zeros = torch.zeros_like(layer.running_mean, dtype=torch.float64)
    return _Moments(0, zeros, zeros)


@contextmanager
def batch_statistics(model: torch.nn.Module) -> Iterator[None]:
    """Batch normalization in training mode; then the modes and running statistics of before."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    modes = [norm.training for norm in norms]
    counts = [getattr(norm, "elements_seen", None) for norm in norms]
    buffers = [{name: b.clone() for name, b in norm.named_buffers()} for norm in norms]
    try:
        for norm in norms:
            norm.training = True
        yield
    finally:
        for norm, mode, count, values in zip(norms, modes, counts, buffers, strict=True):
            norm.training = mode
            if isinstance(norm, BatchNorm):
                norm.elements_seen = count
            for name, value in values.items():
                norm.get_buffer(name).copy_(value)
