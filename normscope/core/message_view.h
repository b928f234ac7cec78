// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/attributes.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"

namespace normscope {

// A non-owning view of the sums of a norm batch, or of a part of it, as ranks send them: limbs,
// then the header. Adding two messages number by number is exact and gives the message of both; up
// to 2^23 canonical messages can be added.
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
