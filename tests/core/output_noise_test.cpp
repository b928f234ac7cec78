// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/output_noise.h"

#include <cmath>
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/random.h"

namespace normscope::testing {
namespace {

constexpr double kEps = 1e-5;

// A share of a batch at a layer with some channels: x and dz, element by element.
struct Share {
  std::vector<std::vector<double>> x, dz;  // [C][elements]
};

// What the layer's callers compute of a share.
struct Sums {
  std::vector<double> means, variances, gradients, products;
  double count;

  explicit Sums(const Share& share) : count(static_cast<double>(share.x[0].size())) {
    for (std::size_t c = 0; c < share.x.size(); ++c) {
      double mean = 0.0, squares = 0.0, gradient = 0.0, product = 0.0;
      for (const double value : share.x[c]) mean += value / std::max(count, 1.0);
      for (std::size_t i = 0; i < share.x[c].size(); ++i) {
        const double distance = share.x[c][i] - mean;
        squares += distance * distance;
        gradient += share.dz[c][i];
        product += share.dz[c][i] * distance;
      }
      means.push_back(mean);
      variances.push_back(squares / std::max(count, 1.0));
      gradients.push_back(gradient);
      products.push_back(product);
    }
  }

  [[nodiscard]] PartMoments moments() const { return {count, count, means, variances}; }
  [[nodiscard]] PartGradients sums() const { return {gradients, products}; }
};

Share random_share(Random& random, std::size_t channels, std::size_t elements) {
  Share share{.x = {}, .dz = {}};
  for (std::size_t c = 0; c < channels; ++c) {
    std::vector<double> x, dz;
    const double shift = 1e3 * random.uniform(), scale = 1.0 + std::abs(random.uniform());
    for (std::size_t i = 0; i < elements; ++i) {
      x.push_back(shift + scale * random.uniform());
      dz.push_back(random.uniform());
    }
    share.x.push_back(x);
    share.dz.push_back(dz);
  }
  return share;
}

struct MeanAndInvStd {
  double mean, inv_std;
};

// Of a channel of several shares, in two passes.
MeanAndInvStd statistics(const std::vector<Share>& shares, std::size_t begin, std::size_t end,
                         std::size_t c) {
  double count = 0.0, mean = 0.0, variance = 0.0;
  for (std::size_t k = begin; k < end; ++k) count += static_cast<double>(shares[k].x[c].size());
  for (std::size_t k = begin; k < end; ++k) {
    for (const double value : shares[k].x[c]) mean += value / count;
  }
  for (std::size_t k = begin; k < end; ++k) {
    for (const double value : shares[k].x[c]) variance += (value - mean) * (value - mean) / count;
  }
  return {mean, 1.0 / std::sqrt(variance + kEps)};
}

// The change of sum(dz * weight * xhat) of a share, element by element.
double change(const std::vector<Share>& shares, std::size_t k, std::size_t size,
              const std::vector<double>& weight) {
  double result = 0.0;
  const std::size_t begin = k / size * size;
  for (std::size_t c = 0; c < weight.size(); ++c) {
    const MeanAndInvStd narrow = statistics(shares, begin, begin + size, c);
    const MeanAndInvStd wide = statistics(shares, 0, shares.size(), c);
    for (std::size_t i = 0; i < shares[k].x[c].size(); ++i) {
      const double x = shares[k].x[c][i];
      result += shares[k].dz[c][i] * weight[c] *
                ((x - narrow.mean) * narrow.inv_std - (x - wide.mean) * wide.inv_std);
    }
  }
  return result;
}

std::vector<SizeNoise> noise_of(const std::vector<Share>& shares, std::size_t first,
                                std::size_t own, const std::vector<std::int64_t>& sizes,
                                const std::vector<double>& weight) {
  std::vector<Sums> sums(shares.begin(), shares.end());
  std::vector<PartMoments> moments;
  std::vector<PartGradients> gradients;
  for (std::size_t k = 0; k < sums.size(); ++k) {
    moments.push_back(sums[k].moments());
    if (k >= first && k < first + own) gradients.push_back(sums[k].sums());
  }
  return noise_of_sizes(moments, gradients, first, sizes, weight, kEps);
}

TEST(OutputNoise, IsTheSquaredChangeOfTheProjectionOfEachShare) {
  Random random(1);
  std::vector<Share> shares;
  for (const std::size_t elements : {7U, 1U, 12U, 5U}) {
    shares.push_back(random_share(random, 3, elements));
  }
  const std::vector<double> weight = {0.5, -2.0, 1.0};

  const std::vector<SizeNoise> noise = noise_of(shares, 1, 2, {1, 2, 4}, weight);

  for (std::size_t i = 0; i < 3; ++i) {
    const std::size_t size = std::size_t{1} << i;
    double expected = 0.0;
    for (const std::size_t k : {1U, 2U}) expected += std::pow(change(shares, k, size, weight), 2);
    // Means of 1e3 deviations: 1e-16 * 1e6 in the variances, a few of which are added.
    EXPECT_NEAR(noise[i].noise, expected, 1e-8 * (1.0 + expected)) << size;
  }
  EXPECT_EQ(noise[2].noise, 0.0);
}

TEST(OutputNoise, NamesTheSmallestNormBatchWithElements) {
  Random random(1);
  std::vector<Share> shares;
  for (const std::size_t elements : {7U, 0U, 12U, 5U}) {
    shares.push_back(random_share(random, 2, elements));
  }

  const std::vector<SizeNoise> noise = noise_of(shares, 0, 4, {1, 2, 4}, {});

  EXPECT_EQ(noise[0].elements, 5.0);
  EXPECT_EQ(noise[1].elements, 7.0);
  EXPECT_EQ(noise[2].elements, 24.0);
  EXPECT_EQ(noise[1].samples, 7.0);  // these shares have one element per sample
  EXPECT_TRUE(std::isfinite(noise[0].noise));
}

TEST(OutputNoise, IsNoneWithoutElements) {
  Random random(1);
  const std::vector<Share> shares(2, random_share(random, 2, 0));

  for (const SizeNoise& each : noise_of(shares, 0, 2, {1, 2}, {})) {
    EXPECT_EQ(each.noise, 0.0);
    EXPECT_EQ(each.elements, 0.0);
  }
}

TEST(OutputNoise, IsNotANumberIfAnInputIsNotFinite) {
  Random random(1);
  std::vector<Share> shares(2, random_share(random, 2, 4));
  shares[1].x[0][2] = HUGE_VAL;

  // The share without infinity, too, since all shares together have no statistics.
  EXPECT_TRUE(std::isnan(noise_of(shares, 0, 1, {1}, {})[0].noise));
}

TEST(MeanVariance, IsThatOfAllSharesAboutTheMeanOfEachChannel) {
  Random random(1);
  std::vector<Share> shares;
  for (const std::size_t elements : {3U, 0U, 8U}) {
    shares.push_back(random_share(random, 2, elements));
  }
  std::vector<Sums> sums(shares.begin(), shares.end());
  std::vector<PartMoments> moments;
  for (const Sums& each : sums) moments.push_back(each.moments());
  double expected = 0.0;
  for (std::size_t c = 0; c < 2; ++c) {
    const double inv_std = statistics(shares, 0, 3, c).inv_std;
    expected += (1.0 / (inv_std * inv_std) - kEps) / 2.0;
  }

  EXPECT_NEAR(mean_variance(moments), expected, 1e-9 * expected);
}

}  // namespace
}  // namespace normscope::testing
