// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "normscope/core/inline.h"

namespace normscope {

// Trailer after the sums of a message. Its totals over R ranks tell whether all ranks made the same
// call: R * sum(h^2) == sum(h)^2 only if all h are equal. h has 20 bits, which keeps these products
// exact in float64 for fewer than 2^13 ranks.
enum HeaderField { kCount, kCallHash, kCallHashSquared, kBackwardNeeded };
inline constexpr std::int64_t kHeaderSize = 4;

struct Header {
  double fields[kHeaderSize] = {};
};

// Whether all ranks made the same call, and either all or none of them need a backward. `totals`
// [kHeaderSize].
[[nodiscard]] NORMSCOPE_INLINE bool ranks_agree(const double* totals, double ranks) noexcept {
  const double h = totals[kCallHash] / ranks;
  const bool same_call = h == std::floor(h) && totals[kCallHashSquared] == ranks * (h * h);
  return same_call && (totals[kBackwardNeeded] == 0.0 || totals[kBackwardNeeded] == ranks);
}

}  // namespace normscope
