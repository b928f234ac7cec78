// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/results.h"

namespace normscope {

// Gradient sums for all channels, in memory that this object owns.
class OwnedGradientSums {
 public:
  explicit OwnedGradientSums(std::int64_t channels)
      : channels_(channels), numbers_(static_cast<std::size_t>(2 * channels)) {}

  [[nodiscard]] GradientSums view() noexcept {
    return {numbers_.data(), numbers_.data() + channels_};
  }

 private:
  std::int64_t channels_;
  AlignedVector<double> numbers_;
};

}  // namespace normscope
