// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <gtest/gtest.h>

#include "normscope/core/activation_functions.h"

namespace normscope::testing {
namespace {

TEST(Activation, OutputTellsTheGradientOfRisingLinesOnly) {
  EXPECT_TRUE(ActivationFunction{Activation::kRelu}.output_tells_gradient());
  EXPECT_TRUE((ActivationFunction{Activation::kLeakyRelu, 0.0}.output_tells_gradient()));
  EXPECT_FALSE((ActivationFunction{Activation::kLeakyRelu, -0.1}.output_tells_gradient()));
  EXPECT_FALSE(ActivationFunction{Activation::kSilu}.output_tells_gradient());
  EXPECT_FALSE(ActivationFunction{}.output_tells_gradient());
}

// The distance of `got` in units in the last place of a Real of the size of `expected`.
template <class Real>
long double units_between(Real got, long double expected) {
  using Limits = std::numeric_limits<Real>;
  int exponent = 0;
  (void)std::frexp(expected, &exponent);
  const int last_bit = std::max(exponent, Limits::min_exponent) - Limits::digits;
  return std::abs(static_cast<long double>(got) - expected) / std::ldexp(1.0L, last_bit);
}

long double silu(long double z) { return z / (1.0L + std::exp(-z)); }

template <class Real>
class SiluOf : public ::testing::Test {};
using Reals = ::testing::Types<float, double>;
TYPED_TEST_SUITE(SiluOf, Reals);

TYPED_TEST(SiluOf, IsWithinTwoUnitsInTheLastPlace) {
  constexpr int kSteps = 1 << 17;
  const TypeParam most = sizeof(TypeParam) == 4 ? 120 : 780;
  for (int i = -kSteps; i <= kSteps; ++i) {
    const TypeParam share = static_cast<TypeParam>(i) / kSteps;
    for (const TypeParam z : {share * most, share * 4, share * share * share}) {
      ASSERT_LE(units_between(Silu<TypeParam>{}(z), silu(z)), 2.0L) << z;
    }
  }
}

TYPED_TEST(SiluOf, IsWithinTwoUnitsForNumbersOfAllSizes) {
  using Bits = std::conditional_t<sizeof(TypeParam) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits kStep = std::numeric_limits<Bits>::max() / 200003;
  for (Bits bits = 0; bits < std::numeric_limits<Bits>::max() - kStep; bits += kStep) {
    const auto z = std::bit_cast<TypeParam>(bits);
    if (!std::isfinite(z)) continue;
    ASSERT_LE(units_between(Silu<TypeParam>{}(z), silu(z)), 2.0L) << z;
  }
}

TYPED_TEST(SiluOf, HasALimitOnEitherSide) {
  const auto infinity = std::numeric_limits<TypeParam>::infinity();
  EXPECT_EQ(Silu<TypeParam>{}(infinity), infinity);
  EXPECT_EQ(Silu<TypeParam>{}(-infinity), 0);
  EXPECT_TRUE(std::isnan(Silu<TypeParam>{}(std::numeric_limits<TypeParam>::quiet_NaN())));
  EXPECT_EQ(Silu<TypeParam>{}.gradient(infinity, 2), 2);
  EXPECT_EQ(Silu<TypeParam>{}.gradient(-infinity, 2), 0);
}

TYPED_TEST(SiluOf, HasItsGradient) {
  for (int i = -100000; i <= 100000; ++i) {
    const TypeParam z = static_cast<TypeParam>(i) / 1000;
    const long double sigmoid = 1.0L / (1.0L + std::exp(-static_cast<long double>(z)));
    const long double expected = 2 * sigmoid * (1 + z * (1 - sigmoid));
    ASSERT_NEAR(static_cast<double>(Silu<TypeParam>{}.gradient(z, 2)),
                static_cast<double>(expected), 8 * std::numeric_limits<TypeParam>::epsilon())
        << z;
  }
}

}  // namespace
}  // namespace normscope::testing
