// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <numbers>
#include <vector>

#include "normscope/core/independent_values.h"
#include "tests/support/random.h"

namespace normscope::testing {

inline constexpr double kEps = 1e-5;

// From a normal distribution (Box and Muller 1958).
inline double normal(Random& random) {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - std::abs(random.uniform())));
  return radius * std::cos(std::numbers::pi * random.uniform());
}

// Makes the elements of one channel of a part.
using MakePart =
    std::function<std::vector<double>(std::int64_t batch, std::int64_t part, std::int64_t channel)>;

// The moments of parts, in two passes. Channels of a part have the same number of elements.
inline PartMoments moments_of(std::int64_t batches, std::int64_t parts, std::int64_t channels,
                              const MakePart& make) {
  PartMoments moments{.batches = batches, .parts = parts, .channels = channels, .rows = {}};
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    for (std::int64_t part = 0; part < parts; ++part) {
      std::vector<double> means, variances;
      double count = 0.0;
      for (std::int64_t channel = 0; channel < channels; ++channel) {
        const std::vector<double> values = make(batch, part, channel);
        count = static_cast<double>(values.size());
        double mean = 0.0, squares = 0.0;
        for (const double value : values) mean += value / count;
        for (const double value : values) squares += (value - mean) * (value - mean);
        means.push_back(mean);
        variances.push_back(values.empty() ? 0.0 : squares / count);
      }
      moments.rows.push_back(count);
      moments.rows.insert(moments.rows.end(), means.begin(), means.end());
      moments.rows.insert(moments.rows.end(), variances.begin(), variances.end());
    }
  }
  return moments;
}

// Independent values from a normal distribution of mean 3 and standard deviation 2.
inline MakePart independent_normal_values(Random& random, std::int64_t values) {
  return [&random, values](std::int64_t, std::int64_t, std::int64_t) {
    std::vector<double> part;
    for (std::int64_t i = 0; i < values; ++i) part.push_back(3.0 + 2.0 * normal(random));
    return part;
  };
}

}  // namespace normscope::testing
