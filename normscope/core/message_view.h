// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/header.h"
#include "normscope/core/inline.h"
#include "normscope/core/limbs.h"

namespace normscope {

// The sums of a norm batch, or of a part of it, as ranks send them: limbs, then the header. Not
// owned. The sum of two, number by number, is exact and stands for both: up to 2^23 that are
// canonical can be added.
struct MessageView {
  double* data = nullptr;  // limbs_size(channels) + kHeaderSize doubles
  std::int64_t channels = 0;

  [[nodiscard]] NORMSCOPE_INLINE LimbsView limbs() const noexcept {
    return {data, channels, channels};
  }
  [[nodiscard]] NORMSCOPE_INLINE double* header() const noexcept {
    return data + kSums * kLimbs * channels;
  }
};

}  // namespace normscope
