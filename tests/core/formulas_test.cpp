// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/formulas.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/random.h"

namespace normscope {
namespace {

using testing::Random;

using Pair = DoubleDouble<double>;

constexpr double kRoundoff = 0x1p-53;

Pair sum_of(const std::vector<double>& x) {
  Pair sum{0.0, 0.0};
  for (const double value : x) sum = add(sum, value);
  return sum;
}

Pair sum_of_squares_of(const std::vector<double>& x) {
  Pair sum{0.0, 0.0};
  for (const double value : x) sum = add(sum, two_product(value, value));
  return sum;
}

Moments<double> moments_of(const std::vector<double>& x) {
  return moments(sum_of(x), sum_of_squares_of(x), static_cast<double>(x.size()));
}

std::vector<double> random_values(std::uint64_t seed) {
  Random random(seed);
  std::vector<double> x(100);
  for (double& value : x) value = random.uniform();
  return x;
}

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

TEST(FormulasTest, MomentsOfOneTwoThree) {
  const Moments<double> result = moments_of({1.0, 2.0, 3.0});

  EXPECT_EQ(result.mean.hi, 2.0);
  EXPECT_EQ(result.mean.lo, 0.0);
  EXPECT_EQ(result.population_variance, 2.0 / 3.0);
}

TEST(FormulasTest, TranslationMovesTheMeanAndKeepsTheVariance) {
  const std::vector<double> x = random_values(2);
  const Moments<double> original = moments_of(x);
  for (const double shift : {1.0, 1e3, 1e6, -1e6}) {
    std::vector<double> moved;
    // Multiples of 2^-32, for which the shifted values are exact.
    for (const double value : x)
      moved.push_back(std::ldexp(std::rint(value * 0x1p32), -32) + shift);
    std::vector<double> back;
    for (const double value : moved) back.push_back(value - shift);
    const Moments<double> expected = moments_of(back);

    const Moments<double> result = moments_of(moved);

    // Five double-double operations of at most 7 u^2 on numbers of the size of the mean's square,
    // then one division by n in float64.
    const double mean_of_squares = shift * shift + original.population_variance;
    EXPECT_NEAR(result.population_variance, expected.population_variance,
                5 * 7 * kRoundoff * kRoundoff * mean_of_squares +
                    4 * kRoundoff * expected.population_variance);
    EXPECT_NEAR((result.mean.hi - shift) + result.mean.lo, expected.mean.hi,
                5 * 7 * kRoundoff * kRoundoff * std::abs(shift) +
                    2 * kRoundoff * std::abs(expected.mean.hi));
  }
}

TEST(FormulasTest, ScalingByAPowerOfTwoScalesEveryBit) {
  const std::vector<double> x = random_values(3);
  const Moments<double> original = moments_of(x);
  for (const double scale : {0x1p-30, 0.5, -4.0, 0x1p40}) {
    std::vector<double> scaled;
    for (const double value : x) scaled.push_back(value * scale);

    const Moments<double> result = moments_of(scaled);

    EXPECT_EQ(result.mean.hi, original.mean.hi * scale);
    EXPECT_EQ(result.mean.lo, original.mean.lo * scale);
    EXPECT_EQ(result.population_variance, original.population_variance * scale * scale);
  }
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

TEST(FormulasTest, GradientSumWithXhatTakesTheMeansRestIntoAccount) {
  // dy = 1, 2 and x - mean_hi = 3, 5 with mean_lo = 0.5: 2 (1 * 2.5 + 2 * 4.5)
  EXPECT_EQ(gradient_sum_with_xhat(Pair{3.0, 0.0}, Pair{13.0, 0.0}, 0.5, 2.0), 23.0);
}

TEST(FormulasTest, UpdatedRunningMovesByMomentum) {
  EXPECT_EQ(updated_running(1.0, 3.0, 0.25), 1.5);
  EXPECT_EQ(updated_running(1.0, 3.0, 0.0), 1.0);
}

TEST(FormulasTest, NormalizeSubtractsBothPartsOfTheMean) {
  const Normalize<float> normalize{.mean_hi = 1.0F, .mean_lo = 0.25F, .scale = 2.0F, .bias = 3.0F};

  EXPECT_EQ(normalize(2.0F), 4.5F);
}

TEST(FormulasTest, InputGradientSubtractsMeanAndSlope) {
  const InputGradient<double> input_gradient{
      .mean_hi = 1.0, .mean_lo = 0.25, .scale = 2.0, .mean_dy = 0.5, .slope = 4.0};

  EXPECT_EQ(input_gradient(2.0, 1.5), ((1.5 - 0.5) - 0.75 * 4.0) * 2.0);
}

}  // namespace
}  // namespace normscope
