// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/independent_values.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/core/part_moments.h"

namespace normscope::testing {
namespace {

constexpr std::int64_t kBatches = 8;
constexpr std::int64_t kParts = 4;
constexpr std::int64_t kChannels = 1024;

// The tolerance for kChannels channels, kBatches batches and kParts parts: about 6 standard errors
// of the variance of q / V, each sqrt(2 / (31 * 1024)) = 0.8 %. The estimator's own bias is of the
// order of 1 / 32, for 32 parts.
constexpr double kRelative = 0.06;

double value_of(const PartMoments& moments) {
  return independent_values(moments, kEps).value().value;
}

class IndependentNormalValues : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(IndependentNormalValues, AreCounted) {
  Random random(1);
  const auto values = static_cast<double>(GetParam());

  const double worth = value_of(
      moments_of(kBatches, kParts, kChannels, independent_normal_values(random, GetParam())));

  EXPECT_NEAR(worth, values, kRelative * values);
}

INSTANTIATE_TEST_SUITE_P(All, IndependentNormalValues, ::testing::Values(1, 2, 4, 16));

TEST(IndependentValues, AreFewIfImagesHaveConstantsOfTheirOwn) {
  Random random(3);
  constexpr int kImages = 4;

  const double worth = value_of(moments_of(kBatches, kParts, kChannels, [&](auto, auto, auto) {
    std::vector<double> part;
    for (int image = 0; image < kImages; ++image) {
      const double constant = normal(random);
      for (int i = 0; i < 50; ++i) part.push_back(constant + normal(random));
    }
    return part;
  }));

  // Half of the variance is the image's own; the other half is as good as known. The variance of q
  // / V is 2 (1/2)^2 / 4, plus 2 (1/2)^2 / 200.
  EXPECT_NEAR(worth, 4.0 * kImages, kRelative * 4.0 * kImages);
}

TEST(IndependentValues, OfUnevenPartsAreThoseOfAPartOfMeanSize) {
  Random random(4);
  const std::vector<int> sizes = {2, 6, 0, 8};

  const double worth = value_of(moments_of(kBatches, kParts, kChannels, [&](auto, auto k, auto) {
    std::vector<double> part;
    for (int i = 0; i < sizes[static_cast<std::size_t>(k)]; ++i) part.push_back(normal(random));
    return part;
  }));

  EXPECT_NEAR(worth, 16.0 / 3.0, kRelative * 16.0 / 3.0);
}

TEST(IndependentValues, AreFewerIfRanksDifferPersistently) {
  Random random(5);
  // Ranks 0 and 1 have inputs of variance 1, ranks 2 and 3 of variance 9: a group of two ranks is
  // not twice as good as one. There are many batches, because the ranks' variances do not vary from
  // batch to batch, which makes the estimate too low by the inverse of the number of parts.
  const PartMoments moments = moments_of(64, kParts, 128, [&](auto, auto k, auto) {
    std::vector<double> part;
    for (int i = 0; i < 8; ++i) part.push_back((k < 2 ? 1.0 : 3.0) * normal(random));
    return part;
  });

  const double one = value_of(moments);
  const double two = value_of(joined(moments, 2));

  // V = 5. The variance of q / V for n values: ((1 - 5)^2 / 5^2 + (9 - 5)^2 / 5^2) / 2 between the
  // ranks, and 2 / n * (1 + 81) / 2 / 5^2 within them.
  const auto expected = [](double n) { return 2.0 / (16.0 / 25.0 + 82.0 / 25.0 / n); };
  EXPECT_NEAR(one, expected(8), kRelative * expected(8));
  EXPECT_NEAR(two, expected(16), kRelative * expected(16));
  EXPECT_LT(two, 1.3 * one);
}

TEST(IndependentValues, OfPartsJoinedAreThoseOfTheirElements) {
  Random random(6);
  const auto make = [&](auto, auto, auto) {
    return std::vector<double>{100.0 + normal(random), 100.0 + normal(random)};
  };
  const PartMoments quarters = moments_of(2, 4, 3, make);

  const PartMoments halves = joined(quarters, 2);

  ASSERT_EQ(halves.parts, 2);
  for (std::int64_t batch = 0; batch < 2; ++batch) {
    for (std::int64_t half = 0; half < 2; ++half) {
      const auto one = quarters.row(batch, 2 * half);
      const auto other = quarters.row(batch, 2 * half + 1);
      const auto both = halves.row(batch, half);
      EXPECT_EQ(both[0], 4.0);
      for (std::size_t c = 1; c <= 3; ++c) {
        const double mean = (one[c] + other[c]) / 2;
        const double distance = (one[c] - other[c]) / 2;
        // A few float64 roundings at a mean of 100.
        EXPECT_NEAR(both[c], mean, 1e-13 * mean);
        const double variance = (one[3 + c] + other[3 + c]) / 2 + distance * distance;
        EXPECT_NEAR(both[3 + c], variance, 1e-11 * variance);
      }
    }
  }
}

TEST(IndependentValues, AreWithinTheirInterval) {
  Random random(7);

  const IndependentValues values =
      independent_values(moments_of(kBatches, kParts, 32, independent_normal_values(random, 8)),
                         kEps)
          .value();

  EXPECT_LT(values.lower, values.value);
  EXPECT_GT(values.upper, values.value);
  EXPECT_LT(values.noisiest_tenth, values.value);
}

TEST(IndependentValues, OfOneBatchHaveNoInterval) {
  Random random(8);

  const IndependentValues values =
      independent_values(moments_of(1, 4, 8, independent_normal_values(random, 8)), kEps).value();

  EXPECT_TRUE(std::isnan(values.lower));
  EXPECT_TRUE(std::isnan(values.upper));
  EXPECT_GT(values.value, 0.0);
}

TEST(IndependentValues, IgnoreChannelsThatEpsNormalizes) {
  Random random(9);
  const auto with_constant = [&](auto, auto, std::int64_t channel) {
    return channel == 2 ? std::vector<double>{1.0, 1.0}
                        : std::vector<double>{normal(random), normal(random)};
  };
  const PartMoments three = moments_of(4, 4, 3, with_constant);
  PartMoments two{.batches = 4, .parts = 4, .channels = 2, .rows = {}};
  for (std::int64_t batch = 0; batch < 4; ++batch) {
    for (std::int64_t part = 0; part < 4; ++part) {
      const auto row = three.row(batch, part);
      for (const std::size_t i : {0U, 1U, 2U, 4U, 5U}) two.rows.push_back(row[i]);
    }
  }

  EXPECT_EQ(value_of(three), value_of(two));
}

TEST(IndependentValues, OfConstantsAreInfinitelyMany) {
  const IndependentValues values =
      independent_values(moments_of(2, 4, 1, [](auto...) { return std::vector<double>(3, 7.0); }),
                         kEps)
          .value();

  EXPECT_EQ(values.value, std::numeric_limits<double>::infinity());
  EXPECT_EQ(values.lower, std::numeric_limits<double>::infinity());
}

TEST(IndependentValues, OfOnePartWithElementsAreUnknown) {
  const PartMoments one = moments_of(1, 3, 1, [](auto, auto k, auto) {
    return k == 1 ? std::vector<double>{1.0, 2.0} : std::vector<double>{};
  });

  EXPECT_FALSE(independent_values(one, kEps).has_value());
}

TEST(IndependentValues, OfMomentsThatAreNotFiniteAreNotANumber) {
  Random random(10);
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    PartMoments moments = moments_of(2, 2, 3, independent_normal_values(random, 4));
    moments.rows[2] = bad;

    const IndependentValues values = independent_values(moments, kEps).value();

    EXPECT_TRUE(std::isnan(values.value)) << bad;
    EXPECT_TRUE(std::isnan(values.lower)) << bad;
    EXPECT_TRUE(std::isnan(values.noisiest_tenth)) << bad;
  }
}

}  // namespace
}  // namespace normscope::testing
