# SPDX-License-Identifier: Apache-2.0
"""The number of independent values that the statistics of a norm batch are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from normscope._binding import ops
from normscope.layers.masks import unmasked_rows

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
