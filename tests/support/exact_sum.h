// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "normscope/core/limbs.h"

namespace normscope::testing {

// A sum in integers: the definition of what limbs must hold. Counts units of 2^-100, the finest
// grid, in digits of 30 bits; digit 0 is the finest.
class ExactSum {
 public:
  // Adds a multiple of 2^-100 below 2^73.
  void add(double value) {
    int exponent = 0;
    const double fraction = std::frexp(value, &exponent);
    auto integer = static_cast<std::int64_t>(std::ldexp(fraction, 53));
    int position = exponent - 53 + 100;  // of the integer's last bit, in units
    for (; integer != 0 && position < 0; ++position) {
      if (integer % 2 != 0) throw std::invalid_argument("value: has bits below 2^-100");
      integer /= 2;
    }
    if (integer == 0) return;
    const int digit = position / 30 < kLimbs ? position / 30 : kLimbs - 1;
    digits_[digit] += Integer{integer} << (position - 30 * digit);
  }

  // The canonical limb k. [exact: fewer than 2^53 grids]
  [[nodiscard]] double limb(int k) const {
    Integer digits[kLimbs];
    for (int i = 0; i < kLimbs; ++i) digits[i] = digits_[i];
    for (int i = 0; i + 1 < kLimbs; ++i) {
      const Integer carry = digits[i] >> 30;  // rounds down, also below zero
      digits[i] -= carry << 30;
      digits[i + 1] += carry;
    }
    return static_cast<double>(digits[kLimbs - 1 - k]) * grid(k);
  }

 private:
  __extension__ using Integer = __int128;
  Integer digits_[kLimbs] = {};
};

}  // namespace normscope::testing
