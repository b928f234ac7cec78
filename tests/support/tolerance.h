// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <gtest/gtest.h>

#include "normscope/core/limbs.h"
#include "normscope/core/tiles.h"
#include "tests/support/oracle.h"

namespace normscope::testing {

// Bounds on rounding errors, to first order in u, the unit roundoff of the type of the arithmetic.
// They hold for any input, so no test depends on luck.

[[nodiscard]] inline long double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 0x1p-53L;
    case DType::kFloat32: return 0x1p-24L;
    case DType::kFloat16: return 0x1p-11L;
    case DType::kBFloat16: return 0x1p-8L;
  }
  return 1.0L;
}

// Half of the smallest denormal: the error of rounding to the type if numbers underflow.
[[nodiscard]] inline long double underflow(DType dtype) {
  switch (dtype) {
    case DType::kFloat64: return 0x1p-1075L;
    case DType::kFloat32: return 0x1p-150L;
    case DType::kFloat16: return 0x1p-25L;
    case DType::kBFloat16: return 0x1p-134L;
  }
  return 0.0L;
}

[[nodiscard]] inline long double arithmetic_roundoff(DType dtype) {
  return dtype == DType::kFloat64 ? 0x1p-53L : 0x1p-24L;
}

// Rounding to an output's type.
[[nodiscard]] inline long double output_rounding(DType dtype, long double value) {
  return unit_roundoff(dtype) * std::abs(value) + underflow(dtype);
}

// The relative error of a tile's sum: a chain of additions, the folds of 64 lanes, and the three
// roundings of a term dy * (x - mean) or (x - pivot)^2.
[[nodiscard]] inline long double tile_sum_roundoff(DType dtype) {
  constexpr std::int64_t kFolds = 6;
  constexpr std::int64_t kTerm = 3;
  return static_cast<long double>(kChannelsFirstTile.chain + kFolds + kTerm) *
         arithmetic_roundoff(dtype);
}

// Totals are exact except for what is below the finest grid (half a grid for each of two parts per
// tile, with at most one tile per element) and for double-double arithmetic: fewer than 2^8 u^2 of
// the largest term. Beyond 2^71 they are as good as float64 sums.
[[nodiscard]] inline long double total_error(std::int64_t count, long double largest) {
  constexpr long double kFinestGrid = grid(kLimbs - 1);
  const auto n = static_cast<long double>(count);
  const bool is_beyond = n * largest >= 0x1p71L;
  return kFinestGrid + 0x1p-98L * largest + (is_beyond ? (2 * n + 16) * 0x1p-53L * largest : 0.0L);
}

struct StatisticsError {
  long double mean = 0.0L;
  long double variance = 0.0L;
  long double relative_inv_std = 0.0L;
};

// A tile's pivot is between its elements, so |x - pivot| is at most twice the largest deviation d.
// With g = tile_sum_roundoff: the mean of s has an error of 2 g d, that of q one of 4 g d^2, and
// the error of s enters the variance with the factor 2 |pivot - mean| <= 4 d.
[[nodiscard]] inline StatisticsError statistics_error(DType dtype, const ChannelMoments& moments,
                                                      double eps) {
  const long double g = tile_sum_roundoff(dtype);
  const long double d = moments.largest_deviation;
  const long double u = arithmetic_roundoff(dtype);
  const long double total_of_x = total_error(moments.count, moments.largest);
  const long double total_of_squares =
      total_error(moments.count, moments.largest * moments.largest);
  StatisticsError error;
  // The mean is kept as a pair: u^2, or the underflow of its second part.
  error.mean = 2 * g * d + total_of_x + u * u * std::abs(moments.mean) + underflow(dtype);
  error.variance = 12 * g * d * d + total_of_squares + 2 * moments.largest * total_of_x;
  // sqrt and the division, in float64.
  error.relative_inv_std =
      error.variance / (2 * (moments.variance + static_cast<long double>(eps))) + 4 * 0x1p-53L;
  return error;
}

// y = ((x - hi) - lo) * scale + bias: two roundings of x - mean, one of scale, one of the product,
// one of the sum, and one of the bias.
[[nodiscard]] inline long double y_error(DType dtype, const ChannelMoments& moments, double eps,
                                         Affine affine, const StatisticsError& error, double x) {
  const long double u = arithmetic_roundoff(dtype);
  const long double scale =
      std::abs(static_cast<long double>(affine.weight)) * moments.inv_std(eps);
  const long double scaled = scale * std::abs(moments.deviation(x));
  const long double y = normalized(moments, eps, affine, x);
  return scale * error.mean + scaled * (error.relative_inv_std + 6 * u) +
         u * (std::abs(static_cast<long double>(affine.bias)) + 2 * std::abs(y)) +
         output_rounding(dtype, y);
}

struct GradientError {
  long double dy = 0.0L;
  long double dy_xhat = 0.0L;
};

[[nodiscard]] inline GradientError gradient_error(DType dtype, const ChannelGradients& gradients,
                                                  long double inv_std,
                                                  const StatisticsError& error) {
  const long double g = tile_sum_roundoff(dtype);
  GradientError result;
  result.dy =
      g * gradients.magnitude_of_dy + total_error(gradients.count, gradients.magnitude_of_dy);
  result.dy_xhat =
      (g + error.relative_inv_std) * gradients.magnitude_of_dy_xhat +
      inv_std * (error.mean * gradients.magnitude_of_dy +
                 total_error(gradients.count, gradients.magnitude_of_dy_xhat / inv_std));
  return result;
}

// dx = ((dy - g1 / n) - ((x - hi) - lo) * slope) * scale: at most six roundings affect any term.
[[nodiscard]] inline long double dx_error(DType dtype, const ChannelGradients& gradients,
                                          double weight, long double inv_std, long double xhat,
                                          double dy, const StatisticsError& error,
                                          const GradientError& sums) {
  const long double u = arithmetic_roundoff(dtype);
  const auto n = static_cast<long double>(gradients.count);
  const long double scale = std::abs(static_cast<long double>(weight)) * inv_std;
  const long double projected = std::abs(xhat * gradients.dy_xhat / n);
  const long double terms =
      std::abs(static_cast<long double>(dy)) + std::abs(gradients.dy / n) + projected;
  const long double dx = input_gradient(gradients, weight, inv_std, xhat, dy);
  return scale * (6 * u * terms + sums.dy / n + std::abs(xhat) * sums.dy_xhat / n +
                  error.relative_inv_std * (projected + terms) +
                  inv_std * error.mean * std::abs(gradients.dy_xhat / n)) +
         output_rounding(dtype, dx);
}

inline void expect_near(double got, long double expected, long double tolerance) {
  ASSERT_LE(std::abs(static_cast<long double>(got) - expected), tolerance)
      << "got " << got << ", expected " << static_cast<double>(expected);
}

// What channel c of a norm batch has to give, and how far from it results may be.
struct ChannelOracle {
  std::int64_t c;
  double eps;
  ChannelMoments moments;
  long double inv_std;
  ChannelGradients gradients;
  StatisticsError error;
  GradientError sums_error;

  void expect_outputs(const Tensor& x, const Tensor& dy, Affine affine, const Tensor& y,
                      const Tensor& dx) const {
    const DType dtype = x.dtype();
    for_channel(x, [&](std::int64_t n, std::int64_t p) {
      const double one_x = x.at(n, c, p);
      const double one_dy = dy.at(n, c, p);
      const long double xhat = moments.deviation(one_x) * inv_std;
      expect_near(y.at(n, c, p), normalized(moments, eps, affine, one_x),
                  y_error(dtype, moments, eps, affine, error, one_x));
      expect_near(
          dx.at(n, c, p), input_gradient(gradients, affine.weight, inv_std, xhat, one_dy),
          dx_error(dtype, gradients, affine.weight, inv_std, xhat, one_dy, error, sums_error));
    });
  }
};

[[nodiscard]] inline ChannelOracle oracle_of(const Tensor& x, const Tensor& dy, std::int64_t c,
                                             double eps) {
  const ChannelMoments moments = moments_of(x, c);
  const long double inv_std = moments.inv_std(eps);
  const ChannelGradients gradients = gradients_of(x, dy, c, moments, inv_std);
  const StatisticsError error = statistics_error(x.dtype(), moments, eps);
  return {.c = c,
          .eps = eps,
          .moments = moments,
          .inv_std = inv_std,
          .gradients = gradients,
          .error = error,
          .sums_error = gradient_error(x.dtype(), gradients, inv_std, error)};
}

}  // namespace normscope::testing
