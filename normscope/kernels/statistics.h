// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/attributes.h"
#include "normscope/kernels/channel_view.h"

namespace normscope NORMSCOPE_EXPORT {

// The statistics that forward keeps for backward. The mean is a pair whose parts have the precision
// of the arithmetic (float32 for inputs up to float32, otherwise float64): docs/numerics.md,
// "Finalize".
template <class Number>
struct BasicStatistics {
  Number* mean_hi = nullptr;  // [C]
  Number* mean_lo = nullptr;  // [C]
  Number* inv_std = nullptr;  // [C] 1 / sqrt(var + eps)

  [[nodiscard]] constexpr BasicStatistics channel_range(std::int64_t begin) const noexcept {
    return {mean_hi + begin, mean_lo + begin, inv_std + begin};
  }

  [[nodiscard]] constexpr BasicStatistics<const Number> read_only() const noexcept {
    return {mean_hi, mean_lo, inv_std};
  }
};
using Statistics = BasicStatistics<const double>;
using MutableStatistics = BasicStatistics<double>;

// The size of ForwardArguments::statistics in doubles.
[[nodiscard]] constexpr std::int64_t statistics_size(std::int64_t slices,
                                                     std::int64_t channels) noexcept {
  return slices * 3 * channels;
}

// The statistics of one slice in an array [slices, 3, C].
template <class Number>
[[nodiscard]] constexpr BasicStatistics<Number> statistics_of_slice(
    Number* statistics, std::int64_t slice, std::int64_t channels) noexcept {
  Number* begin = statistics + slice * statistics_size(1, channels);
  return {begin, begin + channels, begin + 2 * channels};
}

// An update of the running statistics: running += momentum * (batch - running), and `updates` += 1.
// Absent buffers are skipped. An empty norm batch changes nothing.
struct RunningUpdate {
  MutableChannelView mean;  // [C]
  MutableChannelView var;   // [C], of the sample variance (divides by n - 1)
  double momentum = 0.0;
  std::int64_t* updates = nullptr;  // [1] += 1

  NORMSCOPE_INLINE void count() const noexcept {
    if (updates != nullptr) *updates += 1;
  }
};

// How running statistics weigh their updates: by RunningUpdate::momentum, or equally for all
// updates that RunningUpdate::updates has counted.
enum class RunningAverage { kExponential, kCumulative };

// The momentum of the next update of a cumulative average, after `updates` earlier ones.
[[nodiscard]] NORMSCOPE_INLINE double cumulative_momentum(std::int64_t updates) noexcept {
  return 1.0 / (static_cast<double>(updates) + 1.0);
}

// How the slices of a batch update the running statistics: once with the moments of all slices,
// once with those of the first slice, or once per slice in order.
enum class SliceStats { kPooled, kFirst, kSequential };

}  // namespace normscope
