// SPDX-License-Identifier: Apache-2.0
//
// Kernels of a device that sum, and may write the outputs too: to the bit what two kernels write.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/device_kernels.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/support/inputs.h"
#include "tests/support/tensor.h"

namespace normscope::testing {
namespace {

const DeviceKernels& kernels() { return device_kernels_under_test(); }

// The results of both directions of a layer.
class Directions {
 public:
  Directions(const Tensor& x, const Tensor& dy, std::int64_t slices, Gaps of_outputs)
      : y(x.dtype(), x.view().layout(), x.samples(), x.channels(), x.positions(), of_outputs),
        dx(y),
        results_(static_cast<std::size_t>((3 * slices + 6) * x.channels()),
                 std::numeric_limits<double>::quiet_NaN()),
        x_(x.view()),
        dy_(dy.view()),
        batches_(norm_batches(x_, slices)),
        zeros_(static_cast<std::size_t>(device_scratch_size(x_.channels, slices))),
        coefficients_(
            static_cast<std::size_t>(Coefficients::kInputGradient * slices * x_.channels)) {
    for (std::int64_t c = 0; c < x_.channels; ++c) {
      results_[static_cast<std::size_t>(c)] = 1.5 + 0.25 * static_cast<double>(c);
      results_[static_cast<std::size_t>(x_.channels + c)] = 2.0 - 0.5 * static_cast<double>(c);
    }
    std::fill_n(results_.begin() + 2 * x_.channels, 2 * x_.channels, 1.0);  // running statistics
  }

  bool forward(const MutableTensorView& output) {
    return kernels().moments({}, x_, scratch(),
                             {.batches = batches_,
                              .eps = kEps,
                              .weight = read_only(0),
                              .bias = read_only(1),
                              .running = {.mean = numbers(2), .var = numbers(3), .momentum = 0.1},
                              .statistics = statistics(),
                              .coefficients = coefficients()},
                             output);
  }
  void normalize() { kernels().normalize({}, x_, batches_, coefficients(), {}, {}, y.view()); }

  bool backward(const MutableTensorView& output) {
    return kernels().gradient_sums({}, x_, dy_, scratch(),
                                   {.batches = batches_,
                                    .statistics = statistics(),
                                    .weight = read_only(0),
                                    .dweight = numbers(4),
                                    .dbias = numbers(5),
                                    .coefficients = coefficients()},
                                   output);
  }
  void input_gradient() {
    kernels().input_gradient({}, x_, dy_, batches_, coefficients(), dx.view());
  }

  void expect_bits_of(const Directions& expected) const {
    EXPECT_EQ(differences(y, expected.y), 0) << "y";
    EXPECT_EQ(differences(dx, expected.dx), 0) << "dx";
    EXPECT_TRUE(y.untouched_outside(y.view()) && dx.untouched_outside(dx.view()));
    for (std::size_t i = 0; i < results_.size(); ++i) {
      EXPECT_PRED2(same_bits, results_[i], expected.results_[i]) << "result " << i;
    }
    EXPECT_TRUE(std::ranges::all_of(zeros_, [](double number) { return number == 0.0; }));
  }

  Tensor y;
  Tensor dx;

 private:
  static int differences(const Tensor& a, const Tensor& b) {
    int count = 0;
    a.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      count += same_bits(a.at(n, c, p), b.at(n, c, p)) ? 0 : 1;
    });
    return count;
  }

  [[nodiscard]] DeviceScratch scratch() { return {zeros_.data(), x_.channels, batches_.slices}; }
  [[nodiscard]] Coefficients coefficients() { return {coefficients_.data()}; }
  [[nodiscard]] MutableChannelView numbers(std::int64_t i) {
    return {results_.data() + i * x_.channels, DType::kFloat64};
  }
  [[nodiscard]] ChannelView read_only(std::int64_t i) { return {numbers(i).data, DType::kFloat64}; }
  [[nodiscard]] double* statistics() { return results_.data() + 6 * x_.channels; }

  // [6, C]: weight, bias, running mean, running variance, dweight, dbias; then the statistics.
  AlignedVector<double> results_;
  TensorView x_;
  TensorView dy_;
  NormBatches batches_;
  std::vector<double> zeros_;
  AlignedVector<double> coefficients_;
};

class SumAndApply : public ::testing::TestWithParam<std::tuple<DType, Layout>> {
 protected:
  [[nodiscard]] static Tensor filled(const Shape& shape, Inputs inputs, Role role, Gaps gaps = {}) {
    const auto& [dtype, layout] = GetParam();
    Tensor x(dtype, layout, shape.samples, shape.channels, shape.positions, gaps);
    fill(x, inputs, role);
    return x;
  }

  // Checks both directions, and returns in how many one kernel has written the outputs.
  static int directions_of_one_kernel(const Shape& shape, Inputs inputs, std::int64_t slices = 1,
                                      Gaps of_inputs = {}, Gaps of_outputs = {}) {
    const Tensor x = filled(shape, inputs, Role::kX, of_inputs);
    const Tensor dy = filled(shape, Inputs::kCentred, Role::kDy, of_inputs);
    Directions expected(x, dy, slices, of_outputs);
    EXPECT_FALSE(expected.forward({}));
    expected.normalize();
    EXPECT_FALSE(expected.backward({}));
    expected.input_gradient();

    Directions found(x, dy, slices, of_outputs);
    const bool is_y_written = found.forward(found.y.view());
    if (!is_y_written) {
      EXPECT_TRUE(is_untouched(found.y));
      found.normalize();
    }
    const bool is_dx_written = found.backward(found.dx.view());
    if (!is_dx_written) {
      EXPECT_TRUE(is_untouched(found.dx));
      found.input_gradient();
    }
    found.expect_bits_of(expected);
    return (is_y_written ? 1 : 0) + (is_dx_written ? 1 : 0);
  }

  [[nodiscard]] static bool is_channels_first() {
    return std::get<Layout>(GetParam()) == Layout::kChannelsFirst;
  }

  [[nodiscard]] static bool is_untouched(const Tensor& x) {
    TensorView nothing = x.view();
    nothing.samples = 0;
    return x.untouched_outside(nothing);
  }
};

TEST_P(SumAndApply, HasTheBitsOfTwoKernels) {
  for (const Shape& shape : shapes_under_test()) {
    SCOPED_TRACE(::testing::Message()
                 << shape.samples << "x" << shape.channels << "x" << shape.positions);
    for (const Inputs inputs :
         {Inputs::kMeanOf1e3Deviations, Inputs::kTiny, Inputs::kNaN, Inputs::kInfinity}) {
      SCOPED_TRACE(name_of(inputs));
      directions_of_one_kernel(shape, inputs);
    }
  }
}

// Fewer planes than warps, which share them; as many; more; and planes that are shorter than a
// pack. Columns of one block and of several, of one turn and of two; the last column is not full.
// What a cluster can do depends on the device.
TEST_P(SumAndApply, IsOneKernelIfABlockHasAllElementsOfItsChannels) {
  for (const Shape& shape : {Shape{1, 8, 300}, Shape{1, 8, 2049}, Shape{3, 72, 7}, Shape{8, 8, 65},
                             Shape{5, 8, 2}, Shape{1, 16, 64}, Shape{2, 72, 260}}) {
    SCOPED_TRACE(::testing::Message()
                 << shape.samples << "x" << shape.channels << "x" << shape.positions);
    const int found = directions_of_one_kernel(shape, Inputs::kMeanOf1e3Deviations);
    EXPECT_TRUE(found == 2 || !is_channels_first()) << found;
  }
}

TEST_P(SumAndApply, IsOneKernelForPlanesThatStartAtEqualPlacesOfAPack) {
  const Shape shape{3, 5, 131};
  const Inputs inputs = Inputs::kMeanOf1e3Deviations;
  const Gaps gaps{.before = 3, .row = 2, .sample = 1};
  EXPECT_EQ(directions_of_one_kernel(shape, inputs, 1, gaps, gaps), is_channels_first() ? 2 : 0);
  EXPECT_EQ(directions_of_one_kernel(shape, inputs, 1, {}, {.before = 1}), 0);
  EXPECT_EQ(directions_of_one_kernel(shape, inputs, 1, {}, {.row = 1}), 0);
}

TEST_P(SumAndApply, HasTheBitsOfTwoKernelsWithGaps) {
  directions_of_one_kernel({3, 8, 131}, Inputs::kMeanOf1e3Deviations, 1, {},
                           {.before = 8, .row = 16, .sample = 8});
}

TEST_P(SumAndApply, IsTwoKernelsOtherwise) {
  const Inputs inputs = Inputs::kMeanOf1e3Deviations;
  EXPECT_EQ(directions_of_one_kernel({6, 8, 300}, inputs, /*slices=*/3), 0);
  EXPECT_EQ(directions_of_one_kernel({40, 8, 1}, inputs), 0);
  EXPECT_EQ(directions_of_one_kernel({0, 8, 300}, inputs), 0);
  // More blocks for one column than a cluster has, or more elements than their caches.
  EXPECT_EQ(directions_of_one_kernel({1, 8, 100'000}, inputs), 0);
}

INSTANTIATE_TEST_SUITE_P(Device, SumAndApply,
                         ::testing::Combine(::testing::ValuesIn(kAllDTypes),
                                            ::testing::ValuesIn(kAllLayouts)),
                         [](const auto& test) {
                           return std::string(normscope::name_of(std::get<0>(test.param))) + "_" +
                                  name_of(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace normscope::testing
