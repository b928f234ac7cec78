// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/formulas.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include "tests/support/random.h"

namespace normscope {
namespace {

using testing::Random;

using Pair = DoubleDouble<double>;

TEST(FormulasTest, MomentsAboutZeroAreExactForAnyPivot) {
  Random random(1);
  for (int trial = 0; trial < 1000; ++trial) {
    // Small integers around pivots of up to 24 bits: every sum below is exact in float64.
    const auto pivot = static_cast<double>(random.integer(-(1 << 23), 1 << 23));
    double n = 0.0;
    double s = 0.0;
    double q = 0.0;
    std::int64_t sum = 0;
    std::int64_t sum_of_squares = 0;
    for (int i = 0; i < 64; ++i) {
      const std::int64_t x = random.integer(-1000, 1000);
      const double centered = static_cast<double>(x) - pivot;
      n += 1.0;
      s += centered;
      q += centered * centered;
      sum += x;
      sum_of_squares += x * x;
    }

    const TileMoments<double> tile = moments_about_zero(n, pivot, s, q);

    ASSERT_EQ(tile.sum.hi, static_cast<double>(sum));
    ASSERT_EQ(tile.sum.lo, 0.0);
    ASSERT_EQ(tile.sum_of_squares.hi, static_cast<double>(sum_of_squares));
    ASSERT_EQ(tile.sum_of_squares.lo, 0.0);
  }
}

TEST(FormulasTest, MomentsAboutANarrowPivotHaveTheSameBits) {
  Random random(5);
  for (int trial = 0; trial < 100000; ++trial) {
    const auto n = static_cast<double>(random.integer(1, 2048));
    const auto float32 = [&] {
      return static_cast<double>(static_cast<float>(random.of_any_size(-140, 127)));
    };
    // As the sums of a tile: float32, or float64 after an overflow.
    const bool has_overflown = trial % 4 == 0;
    const double pivot = trial % 100 == 0 ? 0.0 : float32();
    const double s = has_overflown ? random.of_any_size(-140, 140) : float32();
    const double q = has_overflown ? random.of_any_size(-140, 280) : std::abs(float32());

    const TileMoments<double> narrow = moments_about_narrow_pivot(n, pivot, s, q);

    const TileMoments<double> any = moments_about_zero(n, pivot, s, q);
    ASSERT_EQ(narrow.sum.hi, any.sum.hi) << n << ' ' << pivot << ' ' << s;
    ASSERT_EQ(narrow.sum.lo, any.sum.lo) << n << ' ' << pivot << ' ' << s;
    ASSERT_EQ(narrow.sum_of_squares.hi, any.sum_of_squares.hi) << n << ' ' << pivot << ' ' << s;
    ASSERT_EQ(narrow.sum_of_squares.lo, any.sum_of_squares.lo) << n << ' ' << pivot << ' ' << s;
  }
}

TEST(FormulasTest, MomentsAboutANarrowPivotPropagateNonFiniteValues) {
  const auto is_nan_in_all = [](const TileMoments<double>& tile) {
    return std::isnan(tile.sum.hi + tile.sum.lo) &&
           std::isnan(tile.sum_of_squares.hi + tile.sum_of_squares.lo);
  };
  const double infinity = std::numeric_limits<double>::infinity();
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(is_nan_in_all(moments_about_narrow_pivot(4.0, infinity, kNaN, kNaN)));
  EXPECT_TRUE(is_nan_in_all(moments_about_narrow_pivot(4.0, 1.0, kNaN, kNaN)));
  EXPECT_TRUE(is_nan_in_all(moments_about_narrow_pivot(4.0, 1.0, infinity, infinity)));
}

TEST(FormulasTest, TotalAddsTheLimbsFromTheFinest) {
  const double limbs[kLimbs] = {3 * 0x1p20, 5 * 0x1p-10, 0.0, 7 * 0x1p-70, 0x1p-100};

  const Pair sum = total(limbs);

  EXPECT_EQ(sum.hi, 3 * 0x1p20 + 5 * 0x1p-10);
  EXPECT_EQ(sum.lo, 7 * 0x1p-70 + 0x1p-100);
}

TEST(FormulasTest, AConstantFloat32HasTheVarianceZeroExactly) {
  Random random(4);
  for (int trial = 0; trial < 10000; ++trial) {
    const double x = static_cast<float>(random.of_any_size(-30, 30));
    const auto n = static_cast<double>(random.integer(1, std::int64_t{1} << 31));
    const TileMoments<double> sums = moments_about_zero(n, x, 0.0, 0.0);

    const Moments<double> result = moments(sums.sum, sums.sum_of_squares, n);

    ASSERT_EQ(result.mean.hi, x);
    ASSERT_EQ(result.mean.lo, 0.0);
    ASSERT_EQ(result.population_variance, 0.0) << n << " times " << x;
  }
}

TEST(FormulasTest, AVarianceBelowZeroBecomesZeroAndNaNStaysNaN) {
  EXPECT_EQ(moments(Pair{2.0, 0.0}, Pair{0.5, 0.0}, 2.0).population_variance, 0.0);
  EXPECT_TRUE(std::isnan(moments(Pair{NAN, 0.0}, Pair{1.0, 0.0}, 2.0).population_variance));
}

}  // namespace
}  // namespace normscope
