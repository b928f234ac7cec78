// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "normscope/core/attributes.h"

namespace normscope {

// Trailer after the sums of a message. Its totals over R ranks tell whether all ranks made the same
// call: R * sum(h^2) == sum(h)^2 only if all h are equal. h has hash_bits(R) bits.
enum HeaderField { kCount, kCallHash, kCallHashSquared, kBackwardNeeded };
inline constexpr std::int64_t kHeaderSize = 4;

// Bits of a hash h whose sums over `ranks` ranks are exact in float64: ranks * h^2 < 2^53. 20 up to
// 2^13 ranks, then one less for every four times as many. `ranks` >= 1.
[[nodiscard]] constexpr int hash_bits(std::int64_t ranks) noexcept {
  constexpr int kMost = 20;
  const auto bits_of_ranks =
      static_cast<int>(std::bit_width(static_cast<std::uint64_t>(ranks) - 1));
  return std::min(kMost, (std::numeric_limits<double>::digits - bits_of_ranks) / 2);
}

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
