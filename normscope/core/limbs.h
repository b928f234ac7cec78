// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/attributes.h"

namespace normscope {

// Exact sums. Every number is split over five doubles on fixed grids. Additions of limbs are then
// exact, and their order does not matter: docs/numerics.md, section "Limbs".
inline constexpr int kLimbs = 5;

// Neighbouring grids are 2^30 apart. The coarsest has room for tile sums up to 2^71; the finest
// keeps 24 bits of a tile sum of 1e-23.
[[nodiscard]] NORMSCOPE_INLINE constexpr double grid(int k) noexcept {
  constexpr double kGrids[kLimbs] = {0x1p20, 0x1p-10, 0x1p-40, 0x1p-70, 0x1p-100};
  return kGrids[k];
}

// The two sums that each direction sends.
inline constexpr int kSumOfValues = 0;    // of x, or of dy
inline constexpr int kSumOfProducts = 1;  // of x^2, or of dy * (x - mean)
inline constexpr int kSums = 2;

// How many tiles per channel one task may add before it must canonicalize its limbs: a tile adds at
// most two parts of 2^29 grids each to a limb, and a double counts 2^53 of them exactly.
inline constexpr std::int64_t kTilesBetweenCarries = std::int64_t{1} << 20;

// A non-owning view of the limbs of kSums sums for a range of channels: limb(s, k)[c], with
// contiguous channels.
struct LimbsView {
  double* data = nullptr;
  // Doubles from one limb to the next: the number of channels of the whole message.
  std::int64_t stride = 0;
  std::int64_t channels = 0;

  [[nodiscard]] constexpr double* limb(int sum, int k) const noexcept {
    return data + (sum * kLimbs + k) * stride;
  }

  [[nodiscard]] constexpr LimbsView channel_range(std::int64_t begin,
                                                  std::int64_t end) const noexcept {
    return {data + begin, stride, end - begin};
  }
};

// How many doubles the limbs of `channels` channels take.
[[nodiscard]] constexpr std::int64_t limbs_size(std::int64_t channels) noexcept {
  return kSums * kLimbs * channels;
}

// The multiple of `spacing` nearest to `value`, for |value| < 2^51 * spacing.
template <class Real>
NORMSCOPE_INLINE Real round_to_grid(Real value, double spacing) noexcept {
  const double shift = 1.5 * 0x1p52 * spacing;
  return (value + shift) - shift;
}

// The largest multiple of `spacing` that is not above `value`. Rounding to nearest would not do:
// with ties, two splits of one total could end in different limbs.
template <class Real>
NORMSCOPE_INLINE Real floor_to_grid(Real value, double spacing) noexcept {
  const Real nearest = round_to_grid(value, spacing);
  return nearest > value ? nearest - spacing : nearest;
}

// Carries from fine to coarse: moves what exceeds the neighbour's grid into the neighbour.
// Afterwards the limbs are a function of their exact total alone, and all but the coarsest are in
// [0, 2^30) grids.
template <class Real>
NORMSCOPE_INLINE void canonicalize(Real (&limbs)[kLimbs]) noexcept {
  for (int k = kLimbs - 1; k > 0; --k) {
    const Real carry = floor_to_grid(limbs[k], grid(k - 1));
    limbs[k] = limbs[k] - carry;
    limbs[k - 1] = limbs[k - 1] + carry;
  }
}

}  // namespace normscope
