// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/double_double.h"

#include <cmath>
#include <cstdint>

#include <gtest/gtest.h>

#include "tests/support/random.h"

namespace normscope {
namespace {

using testing::Random;

// 113 bits: more than a DoubleDouble's 106.
#if defined(__SIZEOF_FLOAT128__)
__extension__ using Quad = __float128;
#else
using Quad = long double;
#endif

constexpr int kPairs = 20000;
constexpr double kUnitRoundoff = 0x1p-53;

using Pair = DoubleDouble<double>;

Quad exact(Pair a) { return Quad{a.hi} + Quad{a.lo}; }

Quad magnitude(Quad a) { return a < 0 ? -a : a; }

// A pair with 106 bits, which Quad holds exactly.
Pair random_pair(Random& random) {
  const double hi = random.of_any_size(-20, 20);
  const auto units =
      static_cast<double>(random.integer(-(std::int64_t{1} << 52), std::int64_t{1} << 52));
  return fast_two_sum(hi, std::ldexp(units, std::ilogb(hi) - 105));
}

// `bound` is in units of u^2. The extra half unit covers the rounding of Quad.
void expect_near(Pair got, Quad expected, double bound) {
  const double error = static_cast<double>(magnitude(exact(got) - expected));
  ASSERT_LE(error, (bound + 0.5) * kUnitRoundoff * kUnitRoundoff *
                       static_cast<double>(magnitude(expected)));
  ASSERT_EQ(got.hi + got.lo, got.hi);  // the parts do not overlap
}

TEST(DoubleDoubleTest, TwoSumIsExact) {
  Random random(1);
  for (int i = 0; i < kPairs; ++i) {
    // Exponents less than 60 apart: the exact sum has at most 113 bits.
    const double a = random.of_any_size(-30, 30);
    const double b = random.of_any_size(-30, 30);

    const Pair sum = two_sum(a, b);

    ASSERT_EQ(sum.hi, a + b);
    ASSERT_TRUE(exact(sum) == Quad{a} + Quad{b}) << a << " + " << b;
    const Pair fast = std::abs(a) >= std::abs(b) ? fast_two_sum(a, b) : fast_two_sum(b, a);
    ASSERT_EQ(fast.hi, sum.hi);
    ASSERT_EQ(fast.lo, sum.lo);
  }
}

// Devices compute the error of a product in another way: with one fused multiply-add.
TEST(DoubleDoubleTest, TheErrorOfAProductIsThatOfAFusedMultiplyAdd) {
  Random random(8);
  for (int i = 0; i < kPairs; ++i) {
    const double a = random.of_any_size(-200, 200);
    const double b = random.of_any_size(-200, 200);
    const double narrow = static_cast<float>(random.of_any_size(-30, 30));

    ASSERT_EQ(product_error(a, b, a * b), std::fma(a, b, -(a * b))) << a << " * " << b;
    ASSERT_EQ(narrow_product_error(a, narrow, a * narrow), std::fma(a, narrow, -(a * narrow)))
        << a << " * " << narrow;
  }
  for (const double a : {0.0, -0.0, 3.0}) {
    EXPECT_EQ(product_error(a, -2.0, a * -2.0), 0.0);
    EXPECT_EQ(narrow_product_error(a, -2.0, a * -2.0), 0.0);
  }
}

// The bounds are those of Joldes, Muller and Popescu (2017) for the same algorithms; cancellation
// is allowed, as in sums of both signs.
TEST(DoubleDoubleTest, OperationsAreWithinTheirBounds) {
  Random random(3);
  for (int i = 0; i < kPairs; ++i) {
    const Pair a = random_pair(random);
    const Pair b = random_pair(random);
    const Pair nearly_opposite{-a.hi, a.lo * 0.5};

    expect_near(add(a, b), exact(a) + exact(b), 3);
    expect_near(add(a, b.hi), exact(a) + Quad{b.hi}, 2);
    expect_near(add(a, nearly_opposite), exact(a) + exact(nearly_opposite), 3);
    expect_near(multiply(a, b), exact(a) * exact(b), 7);
    expect_near(multiply(a, b.hi), exact(a) * Quad{b.hi}, 3);
    expect_near(divide(a, b.hi), exact(a) / Quad{b.hi}, 3.5);
  }
}

}  // namespace
}  // namespace normscope
