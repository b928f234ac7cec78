// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/kernels/kernels.h"
#include "tests/support/inputs.h"
#include "tests/support/tensor.h"

namespace normscope::testing {

inline constexpr double kEps = 1e-5;
inline constexpr double kMomentum = 0.1;

// Limbs in memory of their own.
class OwnedLimbs {
 public:
  explicit OwnedLimbs(std::int64_t channels)
      : channels_(channels), numbers_(static_cast<std::size_t>(limbs_size(channels))) {}

  [[nodiscard]] LimbsView view() { return {numbers_.data(), channels_, channels_}; }
  [[nodiscard]] const std::vector<double>& numbers() const { return numbers_; }
  [[nodiscard]] double limb(int sum, int k, std::int64_t c) const {
    return numbers_[static_cast<std::size_t>((sum * kLimbs + k) * channels_ + c)];
  }

 private:
  std::int64_t channels_;
  std::vector<double> numbers_;
};

class OwnedStatistics {
 public:
  // `before`: what is in the memory.
  explicit OwnedStatistics(std::int64_t channels, double before = 0.0)
      : channels_(channels), numbers_(static_cast<std::size_t>(3 * channels), before) {}

  [[nodiscard]] MutableStatistics view() {
    return {numbers_.data(), numbers_.data() + channels_, numbers_.data() + 2 * channels_};
  }
  [[nodiscard]] const std::vector<double>& numbers() const { return numbers_; }

 private:
  std::int64_t channels_;
  std::vector<double> numbers_;
};

// Runs every kernel of a backend once, in the order of a training step of one rank.
struct KernelRun {
  // `output` has the shape and the strides of y and dx.
  KernelRun(const Tensor& x, const Tensor& output)
      : y(output),
        dx(output),
        moments(x.channels()),
        gradient_sums(x.channels()),
        statistics(x.channels(), /*before=*/std::numeric_limits<double>::quiet_NaN()),
        running_mean(DType::kFloat64, x.channels(), 0.5),
        running_var(DType::kFloat64, x.channels(), 2.0),
        dy_sum(static_cast<std::size_t>(x.channels())),
        dy_xhat_sum(static_cast<std::size_t>(x.channels())) {}

  Tensor y;
  Tensor dx;
  OwnedLimbs moments;
  OwnedLimbs gradient_sums;
  OwnedStatistics statistics;
  ChannelArray running_mean;
  ChannelArray running_var;
  std::vector<double> dy_sum;
  std::vector<double> dy_xhat_sum;
};

[[nodiscard]] inline KernelRun run_kernels(const Kernels& kernels, const Execution& execution,
                                           const Tensor& x, const Tensor& dy,
                                           const ChannelArray& weight, const ChannelArray& bias,
                                           const Tensor& output) {
  KernelRun run(x, output);
  const TensorView view = x.view();
  const auto count = static_cast<double>(view.elements_per_channel());
  const RunningUpdate running{run.running_mean.view(), run.running_var.view(), kMomentum};
  const GradientSums sums{run.dy_sum.data(), run.dy_xhat_sum.data()};
  kernels.add_moments(execution, view, run.moments.view());
  kernels.finalize_moments(execution, run.moments.view(), count, kEps, x.dtype(),
                           {.statistics = run.statistics.view(), .running = running});
  const Statistics statistics = run.statistics.view().read_only();
  const AffineActivation affine{weight.view(), bias.view()};
  kernels.normalize(execution, view, statistics, affine, {}, run.y.view());
  kernels.add_gradient_sums(execution, view, dy.view(), statistics, affine,
                            run.gradient_sums.view());
  kernels.finalize_gradient_sums(execution, run.gradient_sums.view(), statistics, {.sums = sums});
  kernels.input_gradient(execution, view, dy.view(), statistics, affine, sums, count,
                         run.dx.view());
  return run;
}

// The same with outputs like x.
[[nodiscard]] inline KernelRun run_kernels(const Kernels& kernels, const Execution& execution,
                                           const Tensor& x, const Tensor& dy,
                                           const ChannelArray& weight, const ChannelArray& bias) {
  return run_kernels(kernels, execution, x, dy, weight, bias, x);
}

inline void expect_equal_runs(KernelRun& got, KernelRun& expected) {
  EXPECT_EQ(got.moments.numbers(), expected.moments.numbers());
  EXPECT_EQ(got.statistics.numbers(), expected.statistics.numbers());
  EXPECT_EQ(got.running_mean.values(), expected.running_mean.values());
  EXPECT_EQ(got.running_var.values(), expected.running_var.values());
  EXPECT_EQ(got.gradient_sums.numbers(), expected.gradient_sums.numbers());
  EXPECT_EQ(got.dy_sum, expected.dy_sum);
  EXPECT_EQ(got.dy_xhat_sum, expected.dy_xhat_sum);
  got.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_EQ(got.y.at(n, c, p), expected.y.at(n, c, p));
    ASSERT_EQ(got.dx.at(n, c, p), expected.dx.at(n, c, p));
  });
}

// Weights or biases that differ between all channels.
[[nodiscard]] inline ChannelArray parameters(DType dtype, std::int64_t channels, double offset) {
  ChannelArray values(dtype, channels, 0.0);
  for (std::int64_t c = 0; c < channels; ++c) {
    values.set(c, offset + input_at(Inputs::kCentred, dtype, Role::kParameters, 0, c, 0));
  }
  return values;
}

struct Shape {
  std::int64_t samples;
  std::int64_t channels;
  std::int64_t positions;
};

[[nodiscard]] inline std::string describe(const Shape& shape, Inputs inputs) {
  return std::string("[") + std::to_string(shape.samples) + ", " + std::to_string(shape.channels) +
         ", " + std::to_string(shape.positions) + "] " + name_of(inputs);
}

}  // namespace normscope::testing
