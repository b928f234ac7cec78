// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

namespace normscope::testing {

// SplitMix64 (Steele, Lea and Flood 2014): the same numbers on every machine, unlike the
// distributions of the standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  [[nodiscard]] std::uint64_t bits() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27U)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31U);
  }

  // In [begin, end).
  [[nodiscard]] std::int64_t integer(std::int64_t begin, std::int64_t end) {
    return begin + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(end - begin));
  }

  // In [-1, 1), a multiple of 2^-52.
  [[nodiscard]] double uniform() { return static_cast<double>(bits() >> 11U) * 0x1p-52 - 1.0; }

  // Of either sign, with a binary exponent in [begin, end).
  [[nodiscard]] double of_any_size(int begin, int end) {
    const double significand = 1.0 + static_cast<double>(bits() >> 12U) * 0x1p-52;
    const double magnitude = std::ldexp(significand, static_cast<int>(integer(begin, end)));
    return bits() % 2 == 0 ? magnitude : -magnitude;
  }

 private:
  std::uint64_t state_;
};

}  // namespace normscope::testing
