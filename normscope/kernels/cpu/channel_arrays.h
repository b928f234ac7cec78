// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// `count` numbers, rounded up to whole cache lines.
template <class Number>
inline std::int64_t whole_lines(std::int64_t count) {
  const std::size_t bytes = whole_cache_lines(static_cast<std::size_t>(count) * sizeof(Number));
  return static_cast<std::int64_t>(bytes / sizeof(Number));
}

// Replaces any NaN by the one that arithmetic produces, which rounding to 16 bits relies on.
template <class Real>
[[nodiscard]] Real with_plain_nan(Real value) noexcept {
  return value == value ? value : std::numeric_limits<Real>::quiet_NaN();
}

// The coefficients of a formula for every channel: formula_of(c) makes that of channel c. Each
// array starts at a cache line. A full vector can be read from any channel, even past the last one.
template <template <class> class Formula, class Real>
class Formulas {
 public:
  template <class FormulaOf>
  Formulas(std::int64_t channels, const FormulaOf& formula_of)
      : stride_(whole_lines<Real>(channels)),
        values_(static_cast<std::size_t>(kCount * stride_ + kCacheLine)) {
    for (std::int64_t c = 0; c < channels; ++c) {
      const Formula<Real> formula = formula_of(c);
      const auto numbers = std::bit_cast<std::array<Real, kCount>>(formula);
      for (int k = 0; k < kCount; ++k) {
        values_[static_cast<std::size_t>(k * stride_ + c)] =
            with_plain_nan(numbers[static_cast<std::size_t>(k)]);
      }
    }
  }

  // The channels from c on.
  [[nodiscard]] FormulaArrays<Formula, const Real> from(std::int64_t c) const {
    FormulaArrays<Formula, const Real> from;
    for (int k = 0; k < kCount; ++k) from.arrays[k] = values_.data() + k * stride_ + c;
    return from;
  }

 private:
  static constexpr int kCount = FormulaArrays<Formula, Real>::kCount;

  std::int64_t stride_;  // between arrays
  AlignedVector<Real> values_;
};

}  // namespace normscope::cpu
