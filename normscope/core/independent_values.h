// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// How many independent values the statistics of a norm batch are worth: docs/numerics.md,
// "Independent values".

// Moments of the parts that batches were cut into: of ranks, or of slices. A row for each part: how
// many elements each channel has (none: an empty part), the means [C], and the variances [C] with
// the divisor n.
struct PartMoments {
  std::int64_t batches = 0;
  std::int64_t parts = 0;  // of each batch
  std::int64_t channels = 0;
  std::vector<double> rows;  // [batches, parts, 1 + 2 C]

  [[nodiscard]] static constexpr std::int64_t row_size(std::int64_t channels) noexcept {
    return 1 + 2 * channels;
  }

  [[nodiscard]] std::span<const double> row(std::int64_t batch, std::int64_t part) const noexcept {
    const std::int64_t size = row_size(channels);
    return std::span(rows).subspan(static_cast<std::size_t>((batch * parts + part) * size),
                                   static_cast<std::size_t>(size));
  }
};

// Those of `count` consecutive parts together, for each batch; `count` divides the parts.
[[nodiscard]] PartMoments joined(const PartMoments& moments, std::int64_t count);

// The normal values whose variance is as noisy as that of a norm batch of one part.
struct IndependentValues {
  double value = 0.0;  // over all channels, whose squared relative errors are averaged
  // The ends of the 90 % interval, by a jackknife over the batches; NaN for one batch.
  double lower = 0.0;
  double upper = 0.0;
  double noisiest_tenth = 0.0;  // what one channel in ten has less than
};

// Those of a norm batch of so many parts, if the parts are independent.
[[nodiscard]] IndependentValues times(const IndependentValues& values, double factor) noexcept;

// Estimates them from the moments of parts, against those of all parts together. Channels whose
// variance is below eps are left out, since eps normalizes them and not their statistics; a layer
// of such channels alone is worth infinitely many values. Moments that are not finite make NaN.
//
// None where fewer than two parts have elements: nothing can then be compared.
[[nodiscard]] std::optional<IndependentValues> independent_values(const PartMoments& moments,
                                                                  double eps);

}  // namespace normscope
