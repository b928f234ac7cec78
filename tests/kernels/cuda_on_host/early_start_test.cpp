// SPDX-License-Identifier: Apache-2.0
//
// Kernels that start before the previous one has ended: what they read until they have waited for
// it, and that the previous one lets them start.
#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/cache_lines.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
#include "normscope/kernels/device_kernels.h"
#include "tests/kernels/cuda_on_host/backend.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/support/inputs.h"
#include "tests/support/tensor.h"

namespace normscope::testing {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

template <class Number>
std::span<std::byte> bytes_of(std::vector<Number>& numbers) {
  return std::as_writable_bytes(std::span(numbers));
}
std::span<std::byte> bytes_of(AlignedVector<double>& numbers) {
  return std::as_writable_bytes(std::span(numbers));
}
std::span<std::byte> bytes_of(const MutableTensorView& x) {
  return {static_cast<std::byte*>(x.data),
          static_cast<std::size_t>(x.samples * x.sample_stride * size_of(x.dtype))};
}

// The calls of one layer without an exchange library in between, and the memory that they write.
class LayerCalls {
 public:
  LayerCalls(const Tensor& x, const Tensor& dy)
      : x_(x.view()),
        dy_(dy.view()),
        y_(x),
        dz_(x),
        dx_(x),
        zeros_(static_cast<std::size_t>(device_scratch_size(x.channels(), 1))),
        message_(static_cast<std::size_t>(limbs_size(x.channels()) + kHeaderSize), kNaN),
        statistics_(static_cast<std::size_t>(3 * x.channels()), kNaN),
        coefficients_(static_cast<std::size_t>(Coefficients::kInputGradient * x.channels()), kNaN) {
  }

  // What the kernels of a call leave for the next one.
  std::vector<std::span<std::byte>> results() {
    return {bytes_of(message_),  bytes_of(statistics_), bytes_of(coefficients_),
            bytes_of(y_.view()), bytes_of(dz_.view()),  bytes_of(dx_.view())};
  }

  void normalize_alone() {
    kernels().moments({}, x_, scratch(), use_of_moments(batches_), {});
    kernels().normalize({}, x_, batches_, coefficients(), {}, {}, y_.view());
  }

  void normalize_with_ranks() {
    NormBatches shared = batches_;
    shared.totals = message().header();
    Header header = {};
    header.fields[kCount] = static_cast<double>(x_.samples * x_.positions);
    kernels().send_moments({}, x_, scratch(), message(), header);
    kernels().use_moments({}, x_.dtype, message(), scratch(), use_of_moments(shared));
    kernels().normalize({}, x_, shared, coefficients(), {}, {}, y_.view());
  }

  // dz is written by a kernel that starts early, and read by one that starts early.
  void backward_from_input(const ActivationFunction& activation) {
    kernels().moments({}, x_, scratch(), use_of_moments(batches_), {});
    kernels().use_statistics({}, x_.dtype, x_.channels, 1, statistics_.data(), {}, {},
                             coefficients());
    kernels().activation_gradient({}, x_, dy_, batches_, coefficients(), activation, dz_.view());
    input_gradient();
  }

  // Both y and dz are written by a kernel that starts early, and read by one that starts early.
  void backward_from_output(const ActivationFunction& activation) {
    kernels().moments({}, x_, scratch(), use_of_moments(batches_), {});
    kernels().normalize({}, x_, batches_, coefficients(), activation, {}, y_.view());
    kernels().gradient_of_output({}, y_.view().read_only(), dy_, batches_, activation, dz_.view());
    input_gradient();
  }

  void expect_results_of(LayerCalls& expected) {
    const auto equal = [](std::span<std::byte> a, std::span<std::byte> b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end());
    };
    EXPECT_TRUE(equal(bytes_of(y_.view()), bytes_of(expected.y_.view())));
    EXPECT_TRUE(equal(bytes_of(dz_.view()), bytes_of(expected.dz_.view())));
    EXPECT_TRUE(equal(bytes_of(dx_.view()), bytes_of(expected.dx_.view())));
  }

 private:
  static const DeviceKernels& kernels() { return device_kernels_under_test(); }

  [[nodiscard]] DeviceScratch scratch() { return {zeros_.data(), x_.channels}; }
  [[nodiscard]] MessageView message() { return {message_.data(), x_.channels}; }
  [[nodiscard]] Coefficients coefficients() { return {coefficients_.data()}; }
  [[nodiscard]] UseOfMoments use_of_moments(const NormBatches& batches) {
    return {.batches = batches,
            .eps = kEps,
            .statistics = statistics_.data(),
            .coefficients = coefficients()};
  }

  void input_gradient() {
    kernels().gradient_sums(
        {}, x_, dz_.view().read_only(), scratch(),
        {.batches = batches_, .statistics = statistics_.data(), .coefficients = coefficients()},
        {});
    kernels().input_gradient({}, x_, dz_.view().read_only(), batches_, coefficients(), dx_.view());
  }

  TensorView x_;
  TensorView dy_;
  NormBatches batches_ = norm_batches(x_, 1);
  Tensor y_;
  Tensor dz_;
  Tensor dx_;
  std::vector<double> zeros_;
  std::vector<double> message_;
  std::vector<double> statistics_;
  AlignedVector<double> coefficients_;
};

class EarlyKernels : public ::testing::TestWithParam<std::tuple<DType, Layout>> {
 protected:
  // Makes the calls of a layer twice: with each kernel after the other, and with the least that
  // early kernels may rely on. `early`: how many of them the previous kernel lets start.
  template <class Calls>
  static void expect_to_wait_for_what_they_read(int early, const Calls& calls) {
    const auto& [dtype, layout] = GetParam();
    for (const Shape& shape : shapes_under_test()) {
      SCOPED_TRACE(::testing::Message()
                   << shape.samples << "x" << shape.channels << "x" << shape.positions);
      Tensor x(dtype, layout, shape.samples, shape.channels, shape.positions);
      Tensor dy = x;
      fill(x, Inputs::kMeanOf1e3Deviations, Role::kX);
      fill(dy, Inputs::kCentred, Role::kDy);
      LayerCalls expected(x, dy);
      LayerCalls layer(x, dy);
      calls(expected);
      const int before = cuda_on_host::early_starts();

      const cuda_on_host::EarlierMemory earlier(layer.results());
      calls(layer);

      EXPECT_EQ(cuda_on_host::early_starts() - before, early);
      layer.expect_results_of(expected);
    }
  }
};

TEST_P(EarlyKernels, NormalizeAfterTheSum) {
  expect_to_wait_for_what_they_read(1, [](LayerCalls& layer) { layer.normalize_alone(); });
}

TEST_P(EarlyKernels, NormalizeAfterTheUseOfAMessage) {
  expect_to_wait_for_what_they_read(1, [](LayerCalls& layer) { layer.normalize_with_ranks(); });
}

TEST_P(EarlyKernels, BackwardFromTheInputOfAnActivation) {
  expect_to_wait_for_what_they_read(
      2, [](LayerCalls& layer) { layer.backward_from_input({.kind = Activation::kRelu}); });
}

// The gradient from the output starts after a kernel that lets nothing start.
TEST_P(EarlyKernels, BackwardFromTheOutputOfAnActivation) {
  expect_to_wait_for_what_they_read(
      2, [](LayerCalls& layer) { layer.backward_from_output({.kind = Activation::kRelu}); });
}

INSTANTIATE_TEST_SUITE_P(OnHost, EarlyKernels,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16),
                                            ::testing::ValuesIn(kAllLayouts)),
                         [](const auto& test) {
                           return std::string(name_of(std::get<0>(test.param))) + "_" +
                                  name_of(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace normscope::testing
