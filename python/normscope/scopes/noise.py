# SPDX-License-Identifier: Apache-2.0
"""The noise of statistics: how many independent values a norm batch is worth, as measured.

:class:`WatchedLayer` records the inputs of a layer while a model runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from normscope._binding import ops
from normscope.layers.batch_norm import BatchNorm
from normscope.layers.masks import unmasked_rows
from normscope.training.counters import communication_counters
from normscope.training.measuring import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Half the width of a 90 % interval, in standard errors.
_ERRORS_OF_INTERVAL = 1.645


@dataclass(frozen=True)
class PartMoments:
    """Moments of the parts of batches; a part is a rank's batch or a slice.

    Args:
        rows: Float64 [B, K, 1 + 2 C]: for each part the number of elements per channel (0 for an
            empty part), the means, and the variances with divisor n.
    """

    rows: torch.Tensor

    @classmethod
    def of(
        cls, x: torch.Tensor, parts: int = 1, *, mask: torch.Tensor | None = None
    ) -> PartMoments:
        """Compute the moments of a batch x [N, C, *] that is cut along N as by torch.tensor_split.

        If there is a mask [N, 1, *], only the elements where it is True count.
        """
        if mask is None:
            return cls(ops.part_moments(x, parts))
        cut = zip(x.tensor_split(parts), mask.tensor_split(parts), strict=True)
        rows = [ops.part_moments(unmasked_rows(*part), 1) for part in cut]
        return cls(torch.cat(rows, dim=1))

    def followed_by(self, other: PartMoments) -> PartMoments:
        """Return the moments of these batches and of others."""
        return PartMoments(torch.cat([self.rows, other.rows]))

    def beside(self, other: PartMoments) -> PartMoments:
        """Return the moments of these parts and of others, joined for each batch."""
        return PartMoments(torch.cat([self.rows, other.rows], dim=1))


@dataclass(frozen=True)
class IndependentValues:
    """The number of independent values that a norm batch is worth.

    A channel's statistics over a norm batch are as noisy as those of this many independent values
    from a normal distribution. Neighboring positions of an image are not independent: the number is
    far below the number of elements. A wider scope multiplies it.

    Args:
        value: The number for all channels, from the mean of their squared relative errors.
        lower: Lower end of the 90 % interval, by a jackknife over the batches; NaN for one batch.
        upper: Upper end of that interval.
        noisiest_tenth: One channel in ten is worth less than this number.
    """

    value: float
    lower: float
    upper: float
    noisiest_tenth: float

    @property
    def relative_error(self) -> float:
        """The standard error of the noise, 2 / value, as a share of it; NaN where unknown."""
        if math.isinf(self.lower):
            return 0.0
        return (self.value / self.lower - 1) / _ERRORS_OF_INTERVAL


def independent_values(
    moments: PartMoments, eps: float, ranks: int = 1
) -> IndependentValues | None:
    """Estimate the number by comparing the moments of parts with those of all parts together.

    See "Independent values" in docs/numerics.md for the derivation. Channels with a variance below
    eps are left out, because they are normalized by eps and not by their statistics. A layer with
    only such channels is worth infinitely many values.

    Args:
        moments: The moments of the parts.
        eps: The eps of the layer.
        ranks: The number of consecutive parts in a norm batch; divides the number of parts.

    Returns:
        The estimate; None if fewer than two norm batches have elements and can be compared.
    """
    fields = ops.independent_values(moments.rows, ranks, eps)
    return IndependentValues(*fields) if fields else None


@dataclass
class WatchedLayer(Watch):
    """The record of a layer while a model runs.

    Args:
        name: The qualified name.
        layer: The layer that is watched.
        parts: The number of parts of a batch that stand for ranks; None with real ranks.
        calls: The moments of the layer's inputs. Entry i is about the i-th call of the layer in a
            forward of the model, over the batches that made so many calls.
        calls_of_batch: The number of calls so far in the current batch.
        seconds: The time spent in exchanges.
        exchanges: The number of exchanges.
    """

    name: str
    layer: BatchNorm
    parts: int | None
    calls: list[PartMoments] = field(default_factory=list)
    calls_of_batch: int = 0
    seconds: float = 0.0
    exchanges: int = 0

    def train(self, *call: Any) -> torch.Tensor:  # noqa: ANN401
        """Normalize, and record the input and the cost of the exchanges."""
        before = communication_counters()
        y = super().train(*call)
        after = communication_counters()
        self.exchanges += after.calls - before.calls
        self.seconds += after.seconds - before.seconds
        return y

    def look(self, x: torch.Tensor, mask: torch.Tensor | None, *, tracks: bool) -> None:
        """Record the moments of an input, or of its unmasked elements."""
        if self.parts is not None and x.shape[0] < self.parts:
            raise ValueError(
                f"batches: expected at least {self.parts} samples, one for each rank, got "
                f"{x.shape[0]} in {self.name or 'model'}"
            )
        moments = PartMoments.of(x, 1 if self.parts is None else self.parts, mask=mask)
        if self.calls_of_batch == len(self.calls):
            self.calls.append(moments)
        else:
            before = self.calls[self.calls_of_batch]
            self.calls[self.calls_of_batch] = before.followed_by(moments)
        self.calls_of_batch += 1


def gather(watch: WatchedLayer, group: ProcessGroup) -> None:
    """Replace the moments of this rank by those of all ranks, as parts; a collective."""
    label = f"recommend_scopes, {watch.name or 'model'}"
    sizes = [len(moments.rows) for moments in watch.calls]
    own = torch.tensor([sum(sizes), watch.seconds], dtype=torch.float64)
    all_calls, seconds = ops.gather(own, group.group_name, label).T
    if len(set(all_calls.tolist())) > 1:
        raise ValueError(
            f"model: expected {watch.name or 'the layer'} to run as often on every rank, got "
            f"{[int(calls) for calls in all_calls]} times"
        )
    watch.seconds = float(seconds.mean())
    if not watch.calls:
        return
    rows = torch.cat([moments.rows for moments in watch.calls])  # [calls, 1, 1 + 2 C]
    of_ranks = ops.gather(rows.flatten(), group.group_name, label)
    parts = of_ranks.view(group.size(), len(rows), -1).transpose(0, 1)
    watch.calls = [PartMoments(of_call) for of_call in parts.split(sizes)]
