# SPDX-License-Identifier: Apache-2.0
"""How many independent values the statistics of a norm batch are worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Standard errors that the ends of a 90 % interval lie from the estimate.
_ERRORS_OF_INTERVAL = 1.645


@dataclass(frozen=True)
class PartMoments:
    """Moments of the parts that batches were cut into: of ranks, or of slices.

    Args:
        counts: Elements of each channel of a part, float64 [B, K]; a part may be empty.
        means: Float64 [B, K, C].
        variances: With the divisor n, float64 [B, K, C].
    """

    counts: torch.Tensor
    means: torch.Tensor
    variances: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, parts: int = 1) -> PartMoments:
        """Of one batch x [N, C, *], cut along N as torch.tensor_split does, in two passes."""
        channels = x.detach().double().transpose(0, 1)[..., None].flatten(2)  # [C, N, elements]
        cut = [part.flatten(1) for part in channels.tensor_split(parts, dim=1)]
        means = [part.mean(1) if part.shape[1] else part.new_zeros(len(part)) for part in cut]
        variances = [
            (part - mean[:, None]).square().sum(1) / max(1, part.shape[1])
            for part, mean in zip(cut, means, strict=True)
        ]
        counts = torch.tensor([[float(part.shape[1]) for part in cut]], dtype=torch.float64)
        return cls(counts, torch.stack(means)[None].cpu(), torch.stack(variances)[None].cpu())

    def joined(self, parts: int) -> PartMoments:
        """Of so many consecutive parts together (Chan et al. 1979); `parts` divides K."""
        shape = (self.counts.shape[0], -1, parts)
        counts = self.counts.reshape(*shape, 1)
        means = self.means.reshape(*shape, self.means.shape[2])
        variances = self.variances.reshape(*shape, self.means.shape[2])
        total = counts.sum(2)
        divisor = total.clamp_min(1)
        mean = (counts * means).sum(2) / divisor
        about_mean = variances + (means - mean[:, :, None]).square()
        return PartMoments(total.squeeze(2), mean, (counts * about_mean).sum(2) / divisor)

    def followed_by(self, other: PartMoments) -> PartMoments:
        """Of these batches and of others."""
        return PartMoments(
            torch.cat([self.counts, other.counts]),
            torch.cat([self.means, other.means]),
            torch.cat([self.variances, other.variances]),
        )

    def without(self, batch: int) -> PartMoments:
        """Of all batches but one."""
        kept = [i for i in range(len(self.counts)) if i != batch]
        return PartMoments(self.counts[kept], self.means[kept], self.variances[kept])


@dataclass(frozen=True)
class IndependentValues:
    """What a norm batch of one part is worth.

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

    def times(self, factor: float) -> IndependentValues:
        """Of a norm batch of so many parts, if they are independent."""
        return IndependentValues(
            *(factor * end for end in (self.value, self.lower, self.upper, self.noisiest_tenth))
        )


def independent_values(moments: PartMoments, eps: float) -> IndependentValues | None:
    """Estimate from the moments of parts, against those of all of them together.

    docs/numerics.md derives it ("Independent values"). Channels whose variance is below eps are
    left out, since eps normalizes them and not their statistics; a layer of such channels alone is
    worth infinitely many values.

    Returns:
        None where fewer than two parts have elements: nothing can then be compared.
    """
    if int((moments.counts > 0).sum()) < 2:
        return None
    spreads = _relative_spreads(moments, eps)
    noise = relative_noise(moments, eps)
    value = _worth(noise)
    tenth = _worth(_noise_of(spreads.quantile(0.9), moments)) if len(spreads) else value
    batches = len(moments.counts)
    left = [moments.without(batch) for batch in range(batches)] if batches > 1 else []
    if not left or any(int((each.counts > 0).sum()) < 2 for each in left):
        return IndependentValues(value, float("nan"), float("nan"), tenth)
    # Of the noise, whose inverse is the value.
    errors = torch.tensor([relative_noise(each, eps) for each in left], dtype=torch.float64)
    deviation = ((batches - 1) / batches * (errors - errors.mean()).square().sum()).sqrt()
    reach = _ERRORS_OF_INTERVAL * float(deviation)
    return IndependentValues(value, _worth(noise + reach), _worth(max(0.0, noise - reach)), tenth)


def relative_noise(moments: PartMoments, eps: float) -> float:
    """The squared relative error of a part's variance, averaged over the channels: 2 / value.

    At least two parts have elements. 0 where every channel's variance is below eps.
    """
    spreads = _relative_spreads(moments, eps)
    return _noise_of(spreads.mean(), moments) if len(spreads) else 0.0


def _worth(noise: float) -> float:
    """The normal values whose variance has this squared relative error."""
    return 2 / noise if noise > 0 else float("inf")


def _noise_of(spread: torch.Tensor, moments: PartMoments) -> float:
    """A of docs/numerics.md from s^2 / V^2; V^2 itself is too large by s^2 / N."""
    parts = int((moments.counts > 0).sum())
    share = float(spread) / parts
    # 1 where a single part has all of the variance.
    return float(spread) / max(1 - share, 1e-3)


def _relative_spreads(moments: PartMoments, eps: float) -> torch.Tensor:
    """s^2 / V^2 of each channel [C'] whose variance V is at least eps."""
    counts = moments.counts.flatten()
    means, variances = moments.means.flatten(0, 1), moments.variances.flatten(0, 1)
    parts = int((counts > 0).sum())
    # Uneven parts count by their size; 1 is that of the mean part.
    weights = (counts * (parts / counts.sum()))[:, None]
    mean = (weights * means).sum(0) / parts
    errors = variances + (means - mean).square()
    variance = (weights * errors).sum(0) / parts
    spread = (weights * (errors - variance).square()).sum(0) / (parts - 1)
    return (spread / (variance + eps).square())[variance >= eps]
