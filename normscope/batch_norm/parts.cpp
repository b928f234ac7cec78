// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/parts.h"

#include <algorithm>
#include <string>

#include "normscope/core/error.h"

namespace normscope {

void clear(LimbsView limbs) noexcept {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) std::fill_n(limbs.limb(sum, k), limbs.channels, 0.0);
  }
}

std::int64_t slice_count(std::int64_t samples, std::int64_t wanted) {
  if (wanted < 1) {
    throw ArgumentError("slices: expected at least 1, got " + std::to_string(wanted));
  }
  if (samples == 0) return 1;
  // Rounds up; (samples + wanted - 1) could overflow.
  const std::int64_t size = (samples - 1) / wanted + 1;
  return (samples - 1) / size + 1;
}

SampleRange samples_of_slice(std::int64_t samples, std::int64_t slices,
                             std::int64_t slice) noexcept {
  const std::int64_t size = (samples + slices - 1) / slices;
  return {std::min(slice * size, samples), std::min((slice + 1) * size, samples)};
}

}  // namespace normscope
