// SPDX-License-Identifier: Apache-2.0
//
// What every backend promises, the reference included: results within the stated tolerance of the
// oracle, and nothing read but the inputs. A backend joins by being available.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "normscope/kernels/kernels.h"
#include "tests/kernels/channel_run.h"
#include "tests/kernels/kernel_suite.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/support/tolerance.h"

namespace normscope::testing {
namespace {

class KernelContract : public KernelSuite {
 protected:
  static void expect_nothing_else_is_read(const Tensor& x, const Tensor& dy, Tensor& y);
};

// Checks channel c of a run against the oracle.
void check_channel(const Tensor& x, const Tensor& dy, KernelRun& run, std::int64_t c,
                   Affine affine) {
  const auto i = static_cast<std::size_t>(c);
  const ChannelOracle oracle = oracle_of(x, dy, c, kEps);
  const ChannelMoments& moments = oracle.moments;
  const Statistics statistics = run.statistics.view().read_only();
  if (!std::isfinite(static_cast<double>(moments.mean))) {
    ASSERT_TRUE(std::isnan(statistics.mean_hi[c]));
    for (std::int64_t p = 0; p < x.positions(); ++p) {
      ASSERT_TRUE(std::isnan(run.y.at(0, c, p)));
      ASSERT_TRUE(std::isnan(run.dx.at(0, c, p)));
    }
    return;
  }
  const StatisticsError& error = oracle.error;
  // Both means are pairs, which are subtracted part by part.
  expect_near(statistics.mean_lo[c], moments.mean_rest - (statistics.mean_hi[c] - moments.mean),
              error.mean + moments.mean_error());
  expect_near(statistics.inv_std[c], oracle.inv_std, error.relative_inv_std * oracle.inv_std);
  expect_near(run.running_mean[c], 0.5L + 0.1L * (moments.mean - 0.5L),
              error.mean + 4 * 0x1p-53L * (0.5L + moments.largest));
  expect_near(run.running_var[c], 2.0L + 0.1L * (moments.sample_variance() - 2.0L),
              2 * error.variance + 6 * 0x1p-53L * (2.0L + moments.sample_variance()));

  expect_near(run.dy_sum[i], oracle.gradients.dy, oracle.sums_error.dy);
  expect_near(run.dy_xhat_sum[i], oracle.gradients.dy_xhat, oracle.sums_error.dy_xhat);
  oracle.expect_outputs(x, dy, affine, run.y, run.dx);
}

TEST_P(KernelContract, AgreesWithTheOracle) {
  for (const Shape& shape : shapes_under_test()) {
    if (shape.samples * shape.positions == 1) continue;  // no variance: no norm batch is like that
    Tensor dy = tensor(shape);
    fill(dy, Inputs::kCentred, Role::kDy);
    const ChannelArray weight = parameters(DType::kFloat32, shape.channels, 1.5);
    const ChannelArray bias = parameters(DType::kFloat32, shape.channels, 0.0);
    for (const Inputs inputs : kAllInputs) {
      SCOPED_TRACE(describe(shape, inputs));
      Tensor x = tensor(shape);
      fill(x, inputs, Role::kX);

      KernelRun run = run_kernels(kernels(), Execution{}, x, dy, weight, bias);

      for (std::int64_t c = 0; c < shape.channels; ++c) {
        ASSERT_NO_FATAL_FAILURE(check_channel(x, dy, run, c, {weight[c], bias[c]})) << c;
      }
    }
  }
}

TEST_P(KernelContract, ConstantChannelsGiveTheBiasExactly) {
  Tensor x = tensor({3, 5, 70});
  fill(x, Inputs::kConstant, Role::kX);
  const ChannelArray weight = parameters(DType::kFloat32, 5, 1.5);
  const ChannelArray bias = parameters(DType::kFloat32, 5, 0.0);

  KernelRun run = run_kernels(kernels(), Execution{}, x, x, weight, bias);

  run.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    Tensor rounded(dtype(), layout(), 1, 1, 1);
    rounded.set(0, 0, 0, bias[c]);
    ASSERT_EQ(run.y.at(n, c, p), rounded.at(0, 0, 0));
  });
  for (std::int64_t c = 0; c < 5; ++c) {
    if (dtype() != DType::kFloat64) {
      EXPECT_EQ(run.running_var[c], 2.0 + (0.0 - 2.0) * kMomentum);
    }
  }
}

// Under the address sanitizer, makes each access to a tensor's memory outside of its elements an
// error, except up to 7 bytes before a row that does not start at a multiple of 8 bytes.
class OnlyElements {
 public:
  explicit OnlyElements(const Tensor& x) : bytes_(x.bytes()) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(bytes_.data(), bytes_.size());
    const TensorView view = x.view();
    const std::int64_t size = size_of(x.dtype());
    x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      const auto* const element =
          static_cast<const std::byte*>(view.data) +
          size * (n * view.sample_stride + c * view.channel_stride + p * view.position_stride);
      ASAN_UNPOISON_MEMORY_REGION(element, static_cast<std::size_t>(size));
    });
#endif
  }
  OnlyElements(const OnlyElements&) = delete;
  OnlyElements& operator=(const OnlyElements&) = delete;
  ~OnlyElements() {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(bytes_.data(), bytes_.size());
#endif
  }

 private:
  std::span<const std::byte> bytes_;
};

void KernelContract::expect_nothing_else_is_read(const Tensor& x, const Tensor& dy, Tensor& y) {
  const TensorView of_x = x.view();
  const TensorView of_dy = dy.view();
  const ChannelArray ones(DType::kFloat32, of_x.channels, 1.0);
  OwnedStatistics statistics(of_x.channels);
  OwnedLimbs moments(of_x.channels);
  OwnedLimbs gradient_sums(of_x.channels);
  std::vector<double> zeros(static_cast<std::size_t>(of_x.channels));
  const Statistics read_only = statistics.view().read_only();
  const AffineActivation affine{ones.view(), ones.view()};

  kernels().add_moments({}, of_x, moments.view());
  kernels().normalize({}, of_x, read_only, affine, {}, y.view());
  kernels().add_gradient_sums({}, of_x, of_dy, read_only, affine, gradient_sums.view());
  kernels().input_gradient({}, of_x, of_dy, read_only, affine, {zeros.data(), zeros.data()}, 1.0,
                           y.view());

  EXPECT_EQ(moments.numbers(), gradient_sums.numbers());
}

TEST_P(KernelContract, NothingOutsideTensorsIsRead) {
  const std::int64_t row_gap = 16 / size_of(dtype());
  for (const std::int64_t positions : {2, 3, 7, 15, 17, 49, 65, 196, 1089}) {
    const Shape shape{2, 3, positions};
    SCOPED_TRACE(positions);
    const auto ones = [&](Gaps gaps) {
      Tensor x = tensor(shape, gaps);
      x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) { x.set(n, c, p, 1.0); });
      return x;
    };
    const std::int64_t half_pack = 8 / size_of(dtype());
    for (const std::int64_t before : {std::int64_t{0}, half_pack}) {
      const Tensor packed = ones({.before = before});
      const Tensor packed_elsewhere = ones({.before = half_pack - before});
      const Tensor with_gaps = ones({.before = before, .row = row_gap});
      Tensor y = tensor(shape, {.before = before, .row = row_gap});
      const OnlyElements of_packed(packed), of_packed_elsewhere(packed_elsewhere),
          of_with_gaps(with_gaps), of_y(y);

      expect_nothing_else_is_read(packed, packed, y);
      expect_nothing_else_is_read(packed, packed_elsewhere, y);
      expect_nothing_else_is_read(packed, with_gaps, y);
      expect_nothing_else_is_read(with_gaps, with_gaps, y);
    }
  }
}

TEST_P(KernelContract, StridesOfExtentsOfOneMayBeAnything) {
  struct Results {
    Tensor y;
    OwnedLimbs moments;
    OwnedLimbs gradient_sums;
  };
  for (const Shape& shape : {Shape{1, 64, 1}, {5, 64, 1}, {1, 64, 9}}) {
    Tensor x = filled(shape, Inputs::kCentred, Role::kX);
    OwnedStatistics statistics(shape.channels);
    for (std::int64_t c = 0; c < shape.channels; ++c) statistics.view().inv_std[c] = 1.5;
    const Statistics read_only = statistics.view().read_only();
    const auto results_with = [&](std::optional<std::int64_t> stride) {
      const auto with_stride = [&](MutableTensorView view) {
        if (shape.samples == 1) view.sample_stride = stride.value_or(view.sample_stride);
        if (shape.positions == 1) view.position_stride = stride.value_or(view.position_stride);
        return view;
      };
      Results results{tensor(shape), OwnedLimbs(shape.channels), OwnedLimbs(shape.channels)};
      const TensorView of_x = with_stride(x.view()).read_only();
      kernels().normalize({}, of_x, read_only, {}, {}, with_stride(results.y.view()));
      kernels().add_moments({}, of_x, results.moments.view());
      kernels().add_gradient_sums({}, of_x, of_x, read_only, {}, results.gradient_sums.view());
      return results;
    };
    const Results expected = results_with(std::nullopt);
    for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{1}, std::int64_t{-128},
                                      std::numeric_limits<std::int64_t>::max()}) {
      const Results got = results_with(stride);

      EXPECT_EQ(got.moments.numbers(), expected.moments.numbers());
      EXPECT_EQ(got.gradient_sums.numbers(), expected.gradient_sums.numbers());
      got.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
        ASSERT_EQ(got.y.at(n, c, p), expected.y.at(n, c, p)) << describe(shape, Inputs::kCentred);
      });
    }
  }
}

TEST_P(KernelContract, EmptyTensorsAddNothingAndWriteNothing) {
  for (const Shape& shape : {Shape{0, 3, 5}, {2, 0, 5}, {2, 3, 0}}) {
    SCOPED_TRACE(describe(shape, Inputs::kCentred));
    Tensor x = tensor(shape);
    const ChannelArray ones(DType::kFloat32, shape.channels, 1.0);

    KernelRun run = run_kernels(kernels(), Execution{}, x, x, ones, ones);

    EXPECT_EQ(run.moments.numbers(), OwnedLimbs(shape.channels).numbers());
    EXPECT_EQ(run.gradient_sums.numbers(), OwnedLimbs(shape.channels).numbers());
    EXPECT_TRUE(run.y.untouched_outside(run.y.view().read_only()));
    for (std::int64_t c = 0; c < shape.channels; ++c) {
      EXPECT_EQ(run.running_mean[c], 0.5);
      EXPECT_EQ(run.running_var[c], 2.0);
      EXPECT_EQ(run.statistics.view().mean_hi[c], 0.0);
      EXPECT_EQ(run.statistics.view().inv_std[c], 1.0 / std::sqrt(kEps));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Available, KernelContract, combinations_of(kernels_under_test()),
                         name_of_combination);

// Small tensors, computed by hand.
class HandComputed : public ::testing::TestWithParam<const Kernels*> {};

// Parameters and buffers of every type; a buffer is rounded once, from float64.
TEST_P(HandComputed, ParametersAndBuffersOfEveryType) {
  for (const DType dtype : kAllDTypes) {
    Tensor x(DType::kFloat32, Layout::kChannelsFirst, 4, 1, 1);
    for (const int n : {0, 1, 2, 3}) x.set(n, 0, 0, n == 0 ? 1.0 : 0.0);
    const ChannelArray weight(dtype, 1, 0.5);
    const ChannelArray bias(dtype, 1, -2.0);
    ChannelArray running_mean(dtype, 1, 1.0);
    ChannelArray running_var(dtype, 1, 1.0);
    OwnedLimbs limbs(1);
    OwnedStatistics statistics(1);
    Tensor y = x;
    const double count = 4.0;
    // mean 1/4, sample variance 1/4: running becomes 1 - 3/4 momentum, a little below halfway
    // between 1 - 2^-8 and 1 to bfloat16, which float32 cannot tell from halfway.
    const double momentum = (0x1p-9 + 0x1p-40) / 0.75;

    GetParam()->add_moments({}, x.view().read_only(), limbs.view());
    GetParam()->finalize_moments({}, limbs.view(), count, 0.0, DType::kFloat32,
                                 {.statistics = statistics.view(),
                                  .running = {running_mean.view(), running_var.view(), momentum}});
    GetParam()->normalize({}, x.view().read_only(), statistics.view().read_only(),
                          {weight.view(), bias.view()}, {}, y.view());

    ChannelArray expected(dtype, 1, 1.0 - 0.75 * momentum);
    EXPECT_EQ(running_mean[0], expected[0]) << name_of(dtype);
    EXPECT_EQ(running_var[0], expected[0]) << name_of(dtype);
    // xhat = 0.75 / sqrt(3/16) = sqrt(3), within a few roundings.
    EXPECT_NEAR(y.at(0, 0, 0), 0.5 * std::sqrt(3.0) - 2.0, 4 * 0x1p-24);
  }
}

TEST_P(HandComputed, AbsentParametersAreOnesAndZeros) {
  Tensor x(DType::kFloat32, Layout::kChannelsLast, 2, 9, 5);
  fill(x, Inputs::kCentred, Role::kX);
  const ChannelArray ones(DType::kFloat32, 9, 1.0);
  const ChannelArray zeros(DType::kFloat32, 9, 0.0);
  KernelRun run = run_kernels(*GetParam(), Execution{}, x, x, ones, zeros);
  Tensor y = x;

  GetParam()->normalize({}, x.view().read_only(), run.statistics.view().read_only(), {}, {},
                        y.view());

  y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_EQ(y.at(n, c, p), run.y.at(n, c, p));
  });
}

INSTANTIATE_TEST_SUITE_P(Available, HandComputed, ::testing::ValuesIn(kernels_under_test()),
                         [](const auto& kernels) { return std::string(kernels.param->name); });

}  // namespace
}  // namespace normscope::testing
