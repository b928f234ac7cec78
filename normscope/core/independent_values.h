// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// How many independent values the statistics of a norm batch are worth: docs/numerics.md,
// "Independent values".

// Moments of the parts into which batches were cut: ranks or slices. One row per part: the number
// of elements per channel (0 for an empty part), the means [C], and the variances [C] with divisor
// n.
struct PartMoments {
  std::int64_t batches = 0;
  std::int64_t parts = 0;  // per batch
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

// Joins every `count` consecutive parts of each batch. `count` must divide the number of parts.
[[nodiscard]] PartMoments joined(const PartMoments& moments, std::int64_t count);

// The number of independent normal values that have as noisy a variance as a norm batch of one
// part.
struct IndependentValues {
  double value = 0.0;  // from the squared relative errors averaged over all channels
  // The 90 % confidence interval, from a jackknife over the batches; NaN for one batch.
  double lower = 0.0;
  double upper = 0.0;
  double noisiest_tenth = 0.0;  // one channel in ten has fewer
};

// The values of a norm batch of `factor` parts, if the parts are independent.
[[nodiscard]] IndependentValues times(const IndependentValues& values, double factor) noexcept;

// Estimates them by comparing the moments of the parts with those of all parts together. Channels
// whose variance is below eps are left out: they are normalized by eps rather than by their
// statistics. If no channel is left, the result is infinite. Moments that are not finite give NaN.
//
// Returns nullopt if fewer than two parts have elements.
[[nodiscard]] std::optional<IndependentValues> independent_values(const PartMoments& moments,
                                                                  double eps);

}  // namespace normscope
