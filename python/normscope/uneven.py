# SPDX-License-Identifier: Apache-2.0
"""Ranks that have different numbers of batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from normscope import _library, _process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Batch = TypeVar("Batch")

# What a rank says in place of its samples.
_HAS_NO_MORE = -1
_HAS_NO_LIKE = -2


def joined(
    batches: Iterable[Batch],
    process_group: ProcessGroup | None = None,
    *,
    like: Batch | None = None,
) -> Iterator[tuple[Batch, float]]:
    """A rank's batches, then empty ones until every rank has had its last.

    So all ranks make equally many steps, and layers, DistributedDataParallel and whatever else
    waits for all of them find them there. With each batch comes

        weight = ranks / samples of all ranks in this step

    times which the sum of a loss over the rank's samples is to be taken. DistributedDataParallel
    averages gradients over the ranks, and then has the gradient of the mean over all samples,
    however they are spread. The mean over a rank's own samples would be NaN where there is none.
    The weight is 0 where no rank has a sample.

    Each step costs one small exchange, by the way that layers exchange: over shared memory on one
    host, never on the program's own process group. Where all ranks leave the loop in the same step,
    nothing waits. A rank that leaves it alone is waited for until the time limit, when its peers
    raise and name it; those that meet it in a layer raise at once.

    Args:
        batches: This rank's: a data loader, or anything to iterate over. Their tensors have the
            samples in dimension 0.
        process_group: The ranks; None for the default group, or for this process alone where there
            is none.
        like: A batch to make the empty ones from; None for the first of ``batches``.

    Yields:
        A batch, and the weight of each of its samples.

    Raises:
        ValueError: On every rank, if one has neither a batch nor ``like`` while others have
            batches; on one rank, if a batch has no tensor, or tensors of different numbers of
            samples.
        torch.distributed.DistBackendError: If another rank's batches raised, with its reason, or
            a rank does not come within the time limit. The group's exchanges stay failed.
        torch.distributed.DistError: If ranks do something else meanwhile.

    Example:
        >>> for batch, weight in joined([torch.ones(4, 2), torch.ones(1, 2)]):
        ...     print(tuple(batch.shape), weight)
        (4, 2) 0.25
        (1, 2) 1.0
    """
    group = _process_group.name_in_use(_process_group.name_of(process_group))
    own = _with_empty_ones(batches, like)
    while True:
        with _peers_told(group):
            batch, samples = next(own)
        ranks = _library.gather_samples(group, samples)
        if max(ranks) < 0:
            return
        if _HAS_NO_LIKE in ranks:
            without = [rank for rank, n in enumerate(ranks) if n == _HAS_NO_LIKE]
            raise ValueError(
                f"like: expected a batch on ranks without batches, {without}, got None"
            )
        total = sum(n for n in ranks if n > 0)
        yield batch, len(ranks) / total if total else 0.0


def empty_batch_like(batch: Batch) -> Batch:
    """The same without samples: each tensor cut to none in dimension 0.

    Args:
        batch: A tensor, or a tuple, list, mapping or dataclass of such, nested in any way.

    Returns:
        The same structure. Tensors keep dtype, device and their other sizes, and share no memory;
        those without dimensions, and all that is no tensor, stay.

    Example:
        >>> x, y = empty_batch_like((torch.ones(4, 3, 8, 8), torch.ones(4)))
        >>> x.shape, y.shape
        (torch.Size([0, 3, 8, 8]), torch.Size([0]))
    """
    emptied: Batch = _with_tensors(batch, _without_samples)
    return emptied


def _with_empty_ones(
    batches: Iterable[Batch], like: Batch | None
) -> Iterator[tuple[Batch | Any, int]]:
    """Batches with their samples, then without end what a rank gives that has no more."""
    empty = None if like is None else empty_batch_like(like)
    for batch in batches:
        samples = _samples_of(batch)
        if empty is None:
            empty = empty_batch_like(batch)
        yield batch, samples
    while True:
        yield empty, _HAS_NO_LIKE if empty is None else _HAS_NO_MORE


@contextmanager
def _peers_told(group: str) -> Iterator[None]:
    """The peers of a rank whose batches raise need not wait for it."""
    try:
        yield
    except BaseException as error:
        if group:
            reason = f"its batches raised {type(error).__name__}: {error}"
            _library.fail_exchange("world", group, reason)
        raise


def _without_samples(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[:0].clone()


def _samples_of(batch: object) -> int:
    found: list[int] = []

    def look_at(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.shape[0])
        return tensor

    _with_tensors(batch, look_at)
    if not found or len(set(found)) > 1:
        raise ValueError(
            "batches: expected tensors with the same number of samples in dimension 0, got "
            + (f"sizes {found} there" if found else f"no tensor in a {type(batch).__name__}")
        )
    return found[0]


# The structures are those that torch's data loaders make or pass on.
def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401
    """The same with other tensors; those without dimensions have no samples and stay."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() > 0 else value
    if isinstance(value, Mapping):
        changed = {key: _with_tensors(item, change) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(changed)  # type: ignore[call-arg]
        clone = copy.copy(value)  # keeps what a class of its own has besides
        clone.update(changed)
        return clone
    if isinstance(value, (tuple, list)):
        items = [_with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        items = [_with_tensors(getattr(value, name), change) for name in fields]
        return dataclasses.replace(value, **dict(zip(fields, items, strict=True)))
    return value
