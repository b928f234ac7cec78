// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/limbs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/exact_sum.h"
#include "tests/support/random.h"

namespace normscope {
namespace {

using testing::ExactSum;
using testing::Random;

constexpr double kFinest = grid(kLimbs - 1);

struct Limbs {
  double values[kLimbs] = {};

  // Splits a part as every backend does.
  void add(double part) {
    for (int k = 0; k < kLimbs; ++k) {
      const double on_grid = round_to_grid(part, grid(k));
      values[k] += on_grid;
      part -= on_grid;
    }
  }
  void add(const Limbs& other) {
    for (int k = 0; k < kLimbs; ++k) values[k] += other.values[k];
  }
  [[nodiscard]] Limbs canonical() const {
    Limbs limbs = *this;
    canonicalize(limbs.values);
    return limbs;
  }
};

void expect_equal_bits(const Limbs& got, const Limbs& expected) {
  for (int k = 0; k < kLimbs; ++k) {
    ASSERT_EQ(std::bit_cast<std::uint64_t>(got.values[k]),
              std::bit_cast<std::uint64_t>(expected.values[k]))
        << "limb " << k << ": " << got.values[k] << " and " << expected.values[k];
  }
}

void expect_canonical_of(const Limbs& got, const ExactSum& total) {
  Limbs expected;
  for (int k = 0; k < kLimbs; ++k) expected.values[k] = total.limb(k);
  expect_equal_bits(got, expected);
}

// A random multiple of the finest grid, of any size below 2^63.
double random_part(Random& random) {
  const auto integer =
      static_cast<double>(random.integer(-(std::int64_t{1} << 53), std::int64_t{1} << 53));
  return std::ldexp(integer, static_cast<int>(random.integer(-100, 11)));
}

TEST(LimbsTest, NeighbouringGridsAreTwoToTheThirtyApart) {
  for (int k = 1; k < kLimbs; ++k) EXPECT_EQ(grid(k - 1) / grid(k), 0x1p30);
}

TEST(LimbsTest, RoundToGridIsTheNearestMultiple) {
  EXPECT_EQ(round_to_grid(2.4, 1.0), 2.0);
  EXPECT_EQ(round_to_grid(2.6, 1.0), 3.0);
  EXPECT_EQ(round_to_grid(-2.6, 1.0), -3.0);
  EXPECT_EQ(round_to_grid(2.5, 1.0), 2.0);  // ties to even
  EXPECT_EQ(round_to_grid(0x1.fffffp50, 1.0), 0x1.fffffp50);
}

TEST(LimbsTest, FloorToGridIsNeverAbove) {
  EXPECT_EQ(floor_to_grid(2.9, 1.0), 2.0);
  EXPECT_EQ(floor_to_grid(-2.1, 1.0), -3.0);
  EXPECT_EQ(floor_to_grid(-3.0, 1.0), -3.0);
  EXPECT_EQ(floor_to_grid(2.5, 1.0), 2.0);
  EXPECT_EQ(floor_to_grid(3.5, 1.0), 3.0);  // the nearest, with ties to even, is 4
}

TEST(LimbsTest, BitsBelowTheFinestGridAreRoundedAway) {
  Random random(2);
  for (int i = 0; i < 20000; ++i) {
    // At most 53 bits above and below the grid: the sum of the limbs is exact in float64.
    const double part = random.of_any_size(-120, -60);

    Limbs limbs;
    limbs.add(part);

    double sum = 0.0;
    for (const double value : limbs.values) sum += value;
    ASSERT_LE(std::abs(sum - part), kFinest / 2) << part;
  }
}

TEST(LimbsTest, CanonicalLimbsAreAFunctionOfTheTotalAlone) {
  Random random(3);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<double> parts;
    ExactSum total;
    const std::int64_t count = random.integer(1, 400);
    for (std::int64_t i = 0; i < count; ++i) {
      parts.push_back(random_part(random));
      total.add(parts.back());
    }
    for (std::size_t i = parts.size() - 1; i > 0; --i) {
      const std::int64_t other = random.integer(0, static_cast<std::int64_t>(i) + 1);
      std::swap(parts[i], parts[static_cast<std::size_t>(other)]);
    }

    std::vector<Limbs> ranks(static_cast<std::size_t>(random.integer(1, 65)));
    for (const double part : parts) {
      const std::int64_t rank = random.integer(0, static_cast<std::int64_t>(ranks.size()));
      ranks[static_cast<std::size_t>(rank)].add(part);
    }
    Limbs sum;
    for (const Limbs& rank : ranks) {
      for (int k = 0; k < kLimbs; ++k) ASSERT_EQ(std::remainder(rank.values[k], grid(k)), 0.0);
      sum.add(rank.canonical());
    }

    expect_canonical_of(sum.canonical(), total);
  }
}

TEST(LimbsTest, TiesEndInTheSameLimbsHoweverTheyAreSplit) {
  // Half of the finest grid is left out: it is not a multiple of that grid.
  for (int k = 0; k + 1 < kLimbs; ++k) {
    for (const double halves : {1.0, 3.0, -1.0, -3.0, -5.0}) {
      const double tie = halves * grid(k) / 2;
      ExactSum total;
      total.add(tie);

      Limbs whole;
      whole.add(tie);
      Limbs first;
      first.add(tie + grid(k));
      Limbs second;
      second.add(-grid(k));
      first.add(second);

      expect_canonical_of(whole.canonical(), total);
      expect_canonical_of(first.canonical(), total);
    }
  }
}

TEST(LimbsTest, ATotalOfZeroIsPositiveZeros) {
  Limbs limbs;
  for (const double part : {-0.0, 3.75, -3.75, -0.0}) limbs.add(part);

  expect_equal_bits(limbs.canonical(), Limbs{});
}

TEST(LimbsTest, NonFinitePartsMakeEveryLimbNaN) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double part : {infinity, -infinity, std::nan("")}) {
    Limbs limbs;
    limbs.add(1.0);
    limbs.add(part);

    for (const double value : limbs.canonical().values) EXPECT_TRUE(std::isnan(value));
  }
}

TEST(LimbsTest, HoldTheLargestPartsOfAllTilesBetweenCarries) {
  // Half of the next grid: a tie that stays on its grid, and the most that one part adds to a limb.
  for (int k = 1; k < kLimbs; ++k) {
    for (const double sign : {1.0, -1.0}) {
      const double part = sign * grid(k - 1) / 2;
      Limbs limbs;
      ExactSum total;
      for (std::int64_t tile = 0; tile < kTilesBetweenCarries; ++tile) {
        for (int parts = 0; parts < 2; ++parts) limbs.add(part);
        for (int parts = 0; parts < 2; ++parts) total.add(part);
      }
      // Rounding would drop this first, if anything.
      limbs.add(grid(k));
      total.add(grid(k));

      ASSERT_EQ(std::abs(limbs.values[k]), std::abs(sign * 0x1p50 + 1.0) * grid(k));
      expect_canonical_of(limbs.canonical(), total);
    }
  }
}

TEST(LimbsTest, HoldTheSumOfTwoToTheTwentyThreeRanks) {
  Limbs largest;  // the largest canonical limbs that a rank sends; the coarsest is half of 2^73
  for (int k = 1; k < kLimbs; ++k) largest.values[k] = (0x1p30 - 1) * grid(k);
  largest.values[0] = 0x1p29 * grid(0);
  Limbs sum;
  for (int k = 0; k < kLimbs; ++k) {
    sum.values[k] = largest.values[k] * (0x1p23 - 1);
    ASSERT_EQ(sum.values[k] + grid(k) - sum.values[k], grid(k)) << "limb " << k << " is full";
    sum.values[k] += largest.values[k];
  }

  const Limbs canonical = sum.canonical();

  // 2^23 (2^30 - 1) = 2^53 - 2^23: 2^23 (2^30 - 1) carries arrive from every finer limb but the
  // finest.
  EXPECT_EQ(canonical.values[4], (0x1p30 - 0x1p23) * grid(4));
  EXPECT_EQ(canonical.values[3], (0x1p30 - 1) * grid(3));
  EXPECT_EQ(canonical.values[2], (0x1p30 - 1) * grid(2));
  EXPECT_EQ(canonical.values[1], (0x1p30 - 1) * grid(1));
  EXPECT_EQ(canonical.values[0], (0x1p52 + 0x1p23 - 1) * grid(0));
}

TEST(LimbsTest, BeyondTheCoarsestGridSumsStayAsGoodAsFloat64) {
  Random random(6);
  for (const int exponent : {70, 71, 72, 80, 100, 200, 600}) {
    constexpr int kParts = 1000;
    Limbs limbs;
    long double total = 0.0L;
    long double total_of_magnitudes = 0.0L;
    for (int i = 0; i < kParts; ++i) {
      const double part = random.of_any_size(exponent, exponent + 2);
      limbs.add(part);
      total += static_cast<long double>(part);
      total_of_magnitudes += static_cast<long double>(std::abs(part));
    }

    const Limbs canonical = limbs.canonical();
    long double sum = 0.0L;
    for (const double value : canonical.values) sum += static_cast<long double>(value);

    // A float64 sum of 1000 numbers may have 1000 roundings of 2^-53.
    EXPECT_LE(std::abs(sum - total), kParts * 0x1p-53L * total_of_magnitudes) << exponent;
  }
}

}  // namespace
}  // namespace normscope
