// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tests/support/tensor.h"

namespace normscope::testing {

// Two-pass batch normalization in long double, by definition: the correct results. A tensor is a
// norm batch.

struct ChannelMoments {
  std::int64_t count = 0;
  long double mean = 0.0L;
  long double mean_rest = 0.0L;          // of the mean, below the precision of a long double
  long double variance = 0.0L;           // divides by count
  long double largest = 0.0L;            // |x|
  long double largest_deviation = 0.0L;  // |x - mean|

  // The rounding error of mean + mean_rest: mean_rest is a sum of `count` terms as small as the
  // deviations.
  [[nodiscard]] long double mean_error() const {
    return static_cast<long double>(count) * 0x1p-64L * (largest_deviation + std::abs(mean_rest));
  }

  [[nodiscard]] long double deviation(long double x) const { return (x - mean) - mean_rest; }
  [[nodiscard]] long double inv_std(double eps) const {
    return 1.0L / std::sqrt(variance + static_cast<long double>(eps));
  }
  [[nodiscard]] long double sample_variance() const {
    return variance * static_cast<long double>(count) / static_cast<long double>(count - 1);
  }
};

// Calls function(n, p) for the elements of a channel.
template <class Function>
void for_channel(const Tensor& tensor, const Function& function) {
  for (std::int64_t n = 0; n < tensor.samples(); ++n) {
    for (std::int64_t p = 0; p < tensor.positions(); ++p) function(n, p);
  }
}

[[nodiscard]] inline ChannelMoments moments_of(const Tensor& tensor, std::int64_t c) {
  const auto for_elements = [&](const auto& function) {
    for_channel(tensor, [&](std::int64_t n, std::int64_t p) {
      function(static_cast<long double>(tensor.at(n, c, p)));
    });
  };
  ChannelMoments moments;
  long double sum = 0.0L;
  for_elements([&](long double x) {
    moments.count += 1;
    sum += x;
    moments.largest = std::max(moments.largest, std::abs(x));
  });
  if (moments.count == 0) return moments;
  const auto n = static_cast<long double>(moments.count);
  moments.mean = sum / n;
  long double rest = 0.0L;
  for_elements([&](long double x) { rest += x - moments.mean; });
  moments.mean_rest = rest / n;
  long double squares = 0.0L;
  for_elements([&](long double x) {
    const long double deviation = moments.deviation(x);
    squares += deviation * deviation;
    moments.largest_deviation = std::max(moments.largest_deviation, std::abs(deviation));
  });
  moments.variance = squares / n;
  return moments;
}

struct Affine {
  double weight = 1.0;
  double bias = 0.0;
};

[[nodiscard]] inline long double normalized(const ChannelMoments& moments, double eps,
                                            Affine affine, double x) {
  return static_cast<long double>(affine.weight) * moments.deviation(x) * moments.inv_std(eps) +
         static_cast<long double>(affine.bias);
}

struct ChannelGradients {
  std::int64_t count = 0;
  long double dy = 0.0L;                    // sum(dy)
  long double dy_xhat = 0.0L;               // sum(dy * xhat)
  long double magnitude_of_dy = 0.0L;       // sum(|dy|)
  long double magnitude_of_dy_xhat = 0.0L;  // sum(|dy * xhat|)
};

[[nodiscard]] inline ChannelGradients gradients_of(const Tensor& x, const Tensor& dy,
                                                   std::int64_t c, const ChannelMoments& moments,
                                                   long double inv_std) {
  ChannelGradients gradients;
  for_channel(x, [&](std::int64_t n, std::int64_t p) {
    const auto gradient = static_cast<long double>(dy.at(n, c, p));
    const long double with_xhat = gradient * moments.deviation(x.at(n, c, p)) * inv_std;
    gradients.count += 1;
    gradients.dy += gradient;
    gradients.dy_xhat += with_xhat;
    gradients.magnitude_of_dy += std::abs(gradient);
    gradients.magnitude_of_dy_xhat += std::abs(with_xhat);
  });
  return gradients;
}

[[nodiscard]] inline long double input_gradient(const ChannelGradients& gradients, double weight,
                                                long double inv_std, long double xhat, double dy) {
  const auto n = static_cast<long double>(gradients.count);
  return static_cast<long double>(weight) * inv_std *
         (static_cast<long double>(dy) - gradients.dy / n - xhat * gradients.dy_xhat / n);
}

}  // namespace normscope::testing
