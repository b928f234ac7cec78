# SPDX-License-Identifier: Apache-2.0
"""Support for ranks with different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from normscope._binding import groups, ops
from normscope.training.batches import Batch, empty_batch_like, samples_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# Sent instead of a number of samples.
_HAS_NO_MORE = -1
_HAS_NO_LIKE = -2


def joined(
    batches: Iterable[Batch],
    process_group: ProcessGroup | DeviceMesh | None = None,
    *,
    like: Batch | None = None,
) -> Iterator[tuple[Batch, float]]:
    """Yield a rank's batches, then empty ones until every rank has finished.

    All ranks thus make the same number of steps, and can synchronize in layers and in
    DistributedDataParallel. Each batch comes with

        weight = ranks / samples of all ranks in this step

    Multiply the sum of the loss over the rank's samples by it. The average over the ranks, which
    DistributedDataParallel computes for gradients, is then the mean over all samples, however they
    are distributed. The mean over a rank's own samples would be NaN without samples. The weight is
    0 if no rank has a sample.

    Each step costs one small exchange, over the same transport as that of the layers: shared memory
    on one host, and never the program's own process group. All ranks may leave the loop in the same
    step. If a rank leaves it alone, the others wait until the time limit, then raise and name it;
    if that rank runs a layer instead, they raise immediately.

    Args:
        batches: The batches of this rank: a data loader or any other iterable, of the classes that
            :func:`~normscope.training.empty_batch_like` lists. Dimension 0 of their tensors is the
            sample; the samples of a torch_geometric Batch are its graphs.
        process_group: The ranks, or a mesh of one dimension; None for the default group, or for
            this process alone if there is none.
        like: A batch to make the empty ones from; None for the first of ``batches``.

    Yields:
        A batch, and the weight of each of its samples.

    Raises:
        ValueError: On every rank, if one has neither a batch nor ``like`` while others have
            batches; on one rank, if a batch has no tensor, or its tensors have different numbers of
            samples.
        TypeError: On one rank, if :func:`~normscope.training.empty_batch_like` refuses a batch.
        torch.distributed.DistBackendError: If another rank's batches raised, with its reason, or
            a rank does not arrive within the time limit. The group cannot exchange any more.
        torch.distributed.DistError: If other ranks are in a different exchange.

    Example:
        >>> import torch
        >>> for batch, weight in joined([torch.ones(4, 2), torch.ones(1, 2)]):
        ...     print(tuple(batch.shape), weight)
        (4, 2) 0.25
        (1, 2) 1.0
    """
    group = groups.name_in_use(groups.name_of(process_group))
    own = _with_empty_ones(batches, like)
    while True:
        with ops.notifying_peers("world", group, BaseException, "its batches raised "):
            batch, samples = next(own)
        of_ranks = ops.gather_numbers([samples], group, "the next step of joined batches")
        ranks = [int(number) for (number,) in of_ranks]
        if max(ranks) < 0:
            return
        if _HAS_NO_LIKE in ranks:
            without = [rank for rank, n in enumerate(ranks) if n == _HAS_NO_LIKE]
            raise ValueError(
                f"like: expected a batch on ranks without batches, {without}, got None"
            )
        total = sum(n for n in ranks if n > 0)
        yield batch, len(ranks) / total if total else 0.0


def _with_empty_ones(
    batches: Iterable[Batch], like: Batch | None
) -> Iterator[tuple[Batch | Any, int]]:
    """Yield batches with their numbers of samples, then empty batches without end."""
    empty = None if like is None else empty_batch_like(like)
    for batch in batches:
        samples = samples_of(batch)
        if empty is None:
            empty = empty_batch_like(batch)
        yield batch, samples
    while empty is not None:
        yield empty_batch_like(empty), _HAS_NO_MORE  # a program may change what it gets
    yield None, _HAS_NO_LIKE
