// SPDX-License-Identifier: Apache-2.0
//
// Equal bits: every CPU backend follows the specification, and neither threads nor the way samples
// are split change a result. The reference promises accuracy only.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/kernels/kernels.h"
#include "tests/kernels/channel_run.h"
#include "tests/kernels/kernel_suite.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/kernels/tile_specification.h"
#include "tests/support/exact_sum.h"
#include "tests/support/execution.h"

namespace normscope::testing {
namespace {

class KernelBits : public KernelSuite {
 protected:
  // Checks the sums of both directions, the second one with a mean for all channels.
  static void expect_specified_sums(const Tensor& x, const Tensor& dy, double mean) {
    OwnedStatistics statistics(x.channels());
    for (std::int64_t c = 0; c < x.channels(); ++c) statistics.view().mean_hi[c] = mean;
    OwnedLimbs moments(x.channels());
    OwnedLimbs gradient_sums(x.channels());

    kernels().add_moments({}, x.view(), moments.view());
    kernels().add_gradient_sums({}, x.view(), dy.view(), statistics.view().read_only(), {},
                                gradient_sums.view());

    with_element_type(dtype(), [&]<class Element>(Element*) {
      for (std::int64_t c = 0; c < x.channels(); ++c) {
        expect_limbs(moments, c, specified_moments<Element>(x.view(), c));
        expect_limbs(gradient_sums, c,
                     specified_gradient_sums<Element>(x.view(), dy.view(), c, mean));
      }
    });
  }
};

TEST_P(KernelBits, FollowTheSpecification) {
  for (const Shape& shape : shapes_under_test()) {
    const Tensor dy = filled(shape, Inputs::kMeanOf1e3Deviations, Role::kDy);
    const ChannelArray weight = parameters(DType::kFloat32, shape.channels, 1.5);
    const ChannelArray bias = parameters(DType::kFloat32, shape.channels, 0.0);
    for (const Inputs inputs : kAllInputs) {
      // Beyond the coarsest grid, sums of several tiles may depend on the order of the tiles.
      const std::int64_t tiles = shape.samples * tiles_per_sample(layout(), shape.positions);
      if (inputs == Inputs::kHuge && tiles > 1) continue;
      SCOPED_TRACE(describe(shape, inputs));
      const Tensor x = filled(shape, inputs, Role::kX);

      KernelRun run = run_kernels(kernels(), Execution{}, x, dy, weight, bias);

      for (std::int64_t c = 0; c < shape.channels; ++c) {
        with_element_type(dtype(), [&]<class Element>(Element*) {
          ASSERT_NO_FATAL_FAILURE(expect_as_specified<Element>(x, dy, run, weight, bias, c)) << c;
        });
      }
    }
  }
}

// float32 sums that are finite, although their total is not: no reason to sum again in float64.
TEST_P(KernelBits, GradientsNearTheEndOfFloat32FollowTheSpecification) {
  if (dtype() == DType::kFloat16) return;  // its range ends long before
  Tensor x = tensor({2, 9, 2});
  Tensor dy = tensor({2, 9, 2});
  x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    x.set(n, c, p, 1.0);
    dy.set(n, c, p, p == 0 ? 2.9e38 : 1.2345e31);
  });

  expect_specified_sums(x, dy, /*mean=*/0.0);  // which makes the two sums equal
}

// Device kernels add elements of everyday sizes in another way, several rows at a time.
TEST_P(KernelBits, SingleElementsOfAllSizesFollowTheSpecification) {
  const Shape shape{700, 5, 1};
  const int largest = dtype() == DType::kFloat16 ? 14 : 29;
  for (const int smallest : {-70, -30, -3}) {
    SCOPED_TRACE(smallest);
    Tensor x = tensor(shape);
    Tensor dy = tensor(shape);
    x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      // Channel 0 has zeros too, and channel 4 no element beyond 2^8.
      const auto one = [&](std::int64_t i) {
        const int top = c == 4 ? 8 : largest;
        const int exponent = smallest + static_cast<int>(i % (top - smallest));
        const double size = 1.0 + static_cast<double>(i * i * 7919 % 65537) / 65537.0;
        if (c == 0 && i % 3 == 0) return 0.0;
        return std::ldexp(i % 2 == 0 ? size : -size, exponent);
      };
      x.set(n, c, p, one(n * 31 + c));
      dy.set(n, c, p, one(n * 17 + c));
    });

    expect_specified_sums(x, dy, /*mean=*/0.375);
  }
}

TEST_P(KernelBits, DoNotDependOnThreads) {
  // Enough elements for three threads; more and fewer channels than threads; rows of channels that
  // are long enough to be split in two.
  for (const Shape& shape : {Shape{5, 12, 1000}, {3, 2, 10000}, {400, 150, 1}, {3, 2048, 9}}) {
    SCOPED_TRACE(describe(shape, Inputs::kMeanOf1e3Deviations));
    const Tensor x = filled(shape, Inputs::kMeanOf1e3Deviations, Role::kX);
    const Tensor dy = filled(shape, Inputs::kCentred, Role::kDy);
    const ChannelArray weight = parameters(DType::kFloat32, shape.channels, 1.5);
    const ChannelArray bias = parameters(DType::kFloat32, shape.channels, 0.0);
    KernelRun expected = run_kernels(kernels(), Execution{}, x, dy, weight, bias);
    for (const int threads : {2, 3}) {
      KernelRun got = run_kernels(kernels(), on_threads(threads), x, dy, weight, bias);

      expect_equal_runs(got, expected);
    }
  }
}

TEST_P(KernelBits, DoNotDependOnHowSamplesAreSplitAndOrdered) {
  const Shape shape{7, 5, 130};
  const Tensor whole = filled(shape, Inputs::kMeanOf1e3Deviations, Role::kX);
  OwnedLimbs expected(shape.channels);
  kernels().add_moments({}, whole.view(), expected.view());
  const std::vector<std::vector<std::vector<std::int64_t>>> assignments = {
      {{6, 5, 4, 3, 2, 1, 0}},
      {{0, 1, 2}, {3, 4, 5, 6}},
      {{}, {5, 0}, {6}, {4, 1, 3, 2}},
      {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {}},
  };
  for (const auto& ranks : assignments) {
    OwnedLimbs sum(shape.channels);
    std::vector<double> total(expected.numbers().size());
    for (const std::vector<std::int64_t>& samples : ranks) {
      Tensor part = tensor({static_cast<std::int64_t>(samples.size()), 5, 130});
      fill(part, Inputs::kMeanOf1e3Deviations, Role::kX, samples);
      OwnedLimbs own(shape.channels);
      kernels().add_moments({}, part.view().read_only(), own.view());
      for (std::size_t i = 0; i < total.size(); ++i) total[i] += own.numbers()[i];
    }
    std::copy(total.begin(), total.end(), sum.view().data);

    // Adding zeros brings limbs into canonical form.
    Tensor one = tensor({1, 5, 130});
    one.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) { one.set(n, c, p, 0.0); });
    kernels().add_moments({}, one.view().read_only(), sum.view());

    EXPECT_EQ(sum.numbers(), expected.numbers());
  }
}

// Writes the outputs in one call, and again in parts of some samples and channels.
void expect_outputs_of_parts(const Kernels& kernels, const Tensor& x, Tensor y, Tensor dx) {
  const std::int64_t channels = x.channels();
  OwnedStatistics statistics(channels);
  for (std::int64_t c = 0; c < channels; ++c) {
    statistics.view().mean_hi[c] = 0.25;
    statistics.view().inv_std[c] = 1.5;
  }
  const Statistics read_only = statistics.view().read_only();
  const ChannelArray ones(DType::kFloat32, channels, 1.0);
  std::vector<double> dy_sum(static_cast<std::size_t>(channels), 3.0);
  std::vector<double> dy_xhat_sum = dy_sum;
  const GradientSums sums{dy_sum.data(), dy_xhat_sum.data()};
  const double count = 100.0;
  const auto like_x = [&] {
    return Tensor(x.dtype(), x.view().layout(), x.samples(), channels, x.positions());
  };
  Tensor y_of_parts = like_x();
  Tensor dx_of_parts = like_x();

  const AffineActivation affine{ones.view(), ones.view()};
  kernels.normalize({}, x.view(), read_only, affine, {}, y.view());
  kernels.input_gradient({}, x.view(), x.view(), read_only, affine, sums, count, dx.view());
  const std::int64_t width = std::max<std::int64_t>(channels / 64, 8);
  const std::int64_t samples = std::max<std::int64_t>(x.samples() / 64, 1);
  for (std::int64_t n = 0; n < x.samples(); n += samples) {
    const std::int64_t last = std::min(n + samples, x.samples());
    for (std::int64_t c = 0; c < channels; c += width) {
      const std::int64_t end = std::min(c + width, channels);
      const TensorView part = x.view().sample_range(n, last).channel_range(c, end);
      kernels.normalize({}, part, read_only, {.bias = ones.view()}, {},
                        y_of_parts.view().sample_range(n, last).channel_range(c, end));
      kernels.input_gradient({}, part, part, read_only, {}, sums, count,
                             dx_of_parts.view().sample_range(n, last).channel_range(c, end));
    }
  }

  EXPECT_TRUE(y.untouched_outside(y.view().read_only()));
  EXPECT_TRUE(dx.untouched_outside(dx.view().read_only()));
  y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_EQ(y.at(n, c, p), y_of_parts.at(n, c, p));
    ASSERT_EQ(dx.at(n, c, p), dx_of_parts.at(n, c, p));
  });
}

TEST_P(KernelBits, LargeOutputsAreThoseOfTheirParts) {
  for (const Shape& shape : {
           // Above 2 MiB: the output exceeds a core's cache, but its samples do not. Rows of 32
           // channels fill whole cache lines; planes are long enough not to need to.
           Shape{12, 32, 8192 / size_of(dtype()) + 5},
           // More than 512 KiB: rows are read in several runs. Odd rows, short ones of whole cache
           // lines, long ones, one that is cut, and one longer than a run.
           Shape{1, 24, 12001},
           Shape{1, 96, 3001},
           Shape{3001, 96, 1},
           Shape{1, 640, 451},
           Shape{1, 2100, 130},
           Shape{1, 2048, 131},
           Shape{1, 270000, 2},
       }) {
    SCOPED_TRACE(describe(shape, Inputs::kCentred));
    const Tensor x = filled(shape, Inputs::kCentred, Role::kX);
    const Gaps between_vectors{.before = 3};

    expect_outputs_of_parts(kernels(), x, tensor(shape), tensor(shape, between_vectors));
  }
}

// Independent of all formulas: the limbs of a sum of single elements are those of an integer sum,
// and so are those of their squares, however much the elements differ in size. Squares with few
// bits are added in another way than squares with many.
TEST_P(KernelBits, SumsOfSingleElementsAndOfTheirSquaresAreExact) {
  const Shape shape{150, 25, 1};
  const bool has_exact_squares = dtype() != DType::kFloat64;  // whose squares are pairs
  for (const int span : {0, 7, 11, 12, 13, 14, 15, 16, 17, 21, 22, 23, 24, 40}) {
    if (dtype() == DType::kFloat32 && span > 24) continue;  // bits below the finest grid
    SCOPED_TRACE(span);
    Tensor x = tensor(shape);
    x.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      // Except in some channels, all bits of every significand are set. In half of the channels a
      // third of the elements are small, in the others few.
      const double widest = dtype() == DType::kFloat32 ? 2.0 - 0x1p-23 : 2.0 - 0x1p-7;
      const double any = 1.0 + std::abs(input_at(Inputs::kCentred, dtype(), Role::kX, n, c, p));
      const bool is_small = n % (c % 2 == 0 ? 3 : 30) == 0;
      x.set(
          n, c, p,
          std::ldexp(c % 5 == 0 ? any : widest, is_small ? -span : 0) * (n % 2 == 0 ? 1.0 : -1.0));
    });
    OwnedLimbs limbs(shape.channels);

    kernels().add_moments({}, x.view().read_only(), limbs.view());

    for (std::int64_t c = 0; c < shape.channels; ++c) {
      ExactSum sum;
      ExactSum sum_of_squares;
      for (std::int64_t n = 0; n < shape.samples; ++n) {
        const double one = x.at(n, c, 0);
        sum.add(one);
        if (has_exact_squares) sum_of_squares.add(one * one);
      }
      for (int k = 0; k < kLimbs; ++k) {
        ASSERT_EQ(limbs.limb(0, k, c), sum.limb(k)) << k;
        if (!has_exact_squares) continue;
        ASSERT_EQ(limbs.limb(1, k, c), sum_of_squares.limb(k)) << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, KernelBits, combinations_of(kernels_with_equal_bits()),
                         name_of_combination);

// Recorded limbs, which hold machines that never meet to the same bits.
struct Golden {
  DType dtype;
  Layout layout;
  double sums[kSums][kLimbs];
};

const Golden kGolden[] = {
    {DType::kFloat32,
     Layout::kChannelsFirst,
     {{0x1p+22, 0x1.67763p+12, 0x1.8p-12, 0x0p+0, 0x0p+0},
      {0x1.f4ap+31, 0x1.1406d5f8p+19, 0x1.d54ap-11, 0x0p+0, 0x0p+0}}},
    {DType::kFloat32,
     Layout::kChannelsLast,
     {{0x1p+22, 0x1.67763p+12, 0x1.8p-12, 0x0p+0, 0x0p+0},
      {0x1.f4ap+31, 0x1.1406d5f8p+19, 0x1.d134p-11, 0x0p+0, 0x0p+0}}},
    {DType::kFloat64,
     Layout::kChannelsFirst,
     {{0x1p+22, 0x1.677634p+12, 0x1.2b7e938p-14, 0x1.8p-41, 0x0p+0},
      {0x1.f4ap+31, 0x1.140701a8p+19, 0x1.1fe4aep-14, 0x1.957c5d7p-41, 0x1.7fp-73}}},
    {DType::kFloat64,
     Layout::kChannelsLast,
     {{0x1p+22, 0x1.677634p+12, 0x1.2b7e938p-14, 0x1.8p-41, 0x0p+0},
      {0x1.f4ap+31, 0x1.140701a8p+19, 0x1.1fe4aep-14, 0x1.b5d2e9ep-41, 0x1.91cp-72}}},
    {DType::kBFloat16,
     Layout::kChannelsFirst,
     {{0x1p+22, 0x1.64p+12, 0x0p+0, 0x0p+0, 0x0p+0},
      {0x1.f4ap+31, 0x1.ba8p+18, 0x0p+0, 0x0p+0, 0x0p+0}}},
    {DType::kFloat16,
     Layout::kChannelsLast,
     {{0x1p+22, 0x1.68p+12, 0x0p+0, 0x0p+0, 0x0p+0},
      {0x1.f4ap+31, 0x1.1c879p+19, 0x0p+0, 0x0p+0, 0x0p+0}}},
};

TEST(GoldenBits, EveryBackendGivesTheRecordedLimbs) {
  for (const Golden& golden : kGolden) {
    Tensor x(golden.dtype, golden.layout, 2, 1, 2100, {.before = 0, .row = 1, .sample = 0});
    fill(x, Inputs::kMeanOf1e3Deviations, Role::kX);
    for (const Kernels* kernels : kernels_with_equal_bits()) {
      OwnedLimbs limbs(1);
      kernels->add_moments({}, x.view().read_only(), limbs.view());
      for (int sum = 0; sum < kSums; ++sum) {
        for (int k = 0; k < kLimbs; ++k) {
          EXPECT_EQ(limbs.limb(sum, k, 0), golden.sums[sum][k])
              << kernels->name << " " << normscope::name_of(golden.dtype) << " "
              << name_of(golden.layout) << " sum " << sum << " limb " << k;
        }
      }
    }
  }
}

}  // namespace
}  // namespace normscope::testing
