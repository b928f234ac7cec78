# SPDX-License-Identifier: Apache-2.0
"""How many independent values the statistics of a norm batch are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from normscope import _library
from normscope._rows import unmasked_rows

# Standard errors that the ends of a 90 % interval lie from the estimate.
_ERRORS_OF_INTERVAL = 1.645


@dataclass(frozen=True)
class PartMoments:
    """Moments of the parts that batches were cut into: of ranks, or of slices.

    Args:
        rows: Float64 [B, K, 1 + 2 C]: of each part the number of elements of a channel (0: an empty
            part), the means, and the variances with the divisor n.
    """

    rows: torch.Tensor

    @classmethod
    def of(
        cls, x: torch.Tensor, parts: int = 1, *, mask: torch.Tensor | None = None
    ) -> PartMoments:
        """Of one batch x [N, C, *], cut along N as torch.tensor_split does.

        A mask [N, 1, *] says what of it counts.
        """
        if mask is None:
            return cls(_library.part_moments(x, parts))
        cut = zip(x.tensor_split(parts), mask.tensor_split(parts), strict=True)
        rows = [_library.part_moments(unmasked_rows(*part), 1) for part in cut]
        return cls(torch.cat(rows, dim=1))

    @classmethod
    def of_nothing(cls, channels: int) -> PartMoments:
        """Of one part without elements."""
        return cls(torch.zeros(1, 1, 1 + 2 * channels, dtype=torch.float64))

    @property
    def counts(self) -> torch.Tensor:
        """Elements of each channel of a part [B, K]."""
        return self.rows[:, :, 0]

    def followed_by(self, other: PartMoments) -> PartMoments:
        """Of these batches and of others."""
        return PartMoments(torch.cat([self.rows, other.rows]))

    def beside(self, other: PartMoments) -> PartMoments:
        """Of the parts of these and of others, batch by batch."""
        return PartMoments(torch.cat([self.rows, other.rows], dim=1))


@dataclass(frozen=True)
class IndependentValues:
    """What a norm batch is worth.

    A channel's statistics over a norm batch are as noisy as those of this many independent values
    from a normal distribution. Neighbouring positions of an image are not independent, so that it
    is far below the number of elements; it is what a wider scope multiplies.

    Args:
        value: Over all channels, whose squared relative errors are averaged.
        lower: Lower end of the 90 % interval, by a jackknife over the batches; NaN for one batch.
        upper: Upper end of that interval.
        noisiest_tenth: What one channel in ten has less than.
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
    """Estimate from the moments of parts, against those of all of them together.

    docs/numerics.md derives it ("Independent values"). Channels whose variance is below eps are
    left out, since eps normalizes them and not their statistics; a layer of such channels alone is
    worth infinitely many values.

    Args:
        moments: Of the parts.
        eps: The layer's.
        ranks: Consecutive parts that make a norm batch; they divide the parts.

    Returns:
        None where fewer than two norm batches have elements: nothing can then be compared.
    """
    fields = _library.independent_values(moments.rows, ranks, eps)
    return IndependentValues(*fields) if fields else None
