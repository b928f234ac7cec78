// SPDX-License-Identifier: Apache-2.0
//
// Normalizing and activating in one sweep gives the same bits as a sequence of single operations,
// each of which stores its result.
#include "tests/support/activation.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/activation_functions.h"
#include "normscope/kernels/kernels.h"
#include "tests/kernels/channel_run.h"
#include "tests/kernels/kernel_suite.h"
#include "tests/kernels/kernels_under_test.h"
#include "tests/support/execution.h"

namespace normscope::testing {
namespace {

// A layer's parameters, and the statistics of its input.
struct Layer {
  Layer(const Kernels& kernels, const Tensor& x)
      : weight(parameters(DType::kFloat32, x.channels(), 1.5)),
        bias(parameters(DType::kFloat32, x.channels(), 1.0)),
        statistics(x.channels()) {
    OwnedLimbs limbs(x.channels());
    kernels.add_moments({}, x.view(), limbs.view());
    kernels.finalize_moments({}, limbs.view(), static_cast<double>(x.view().elements_per_channel()),
                             kEps, x.dtype(), {.statistics = statistics.view()});
  }

  [[nodiscard]] AffineActivation with(const ActivationFunction& activation) const {
    return {weight.view(), bias.view(), activation};
  }

  const ChannelArray weight;
  const ChannelArray bias;
  OwnedStatistics statistics;
};

class ActivatedKernels : public KernelSuite {
 protected:
  // Calls check(activation, shape, x, dy) for all activations and shapes. The kinds of inputs take
  // turns: elements are activated one by one, wherever they are.
  template <class Check>
  static void for_activations(const Check& check) {
    constexpr Inputs kKinds[] = {Inputs::kCentred, Inputs::kTiny, Inputs::kInfinity};
    std::size_t turn = 0;
    for (const Shape& shape : shapes_under_test()) {
      if (shape.samples * shape.positions * shape.channels > 30000) continue;
      const Tensor dy = filled(shape, Inputs::kMeanOf1e3Deviations, Role::kDy);
      const Inputs inputs = kKinds[turn++ % std::size(kKinds)];
      const Tensor x = filled(shape, inputs, Role::kX);
      for (const ActivationFunction& activation : kAllActivations) {
        SCOPED_TRACE(describe(shape, inputs) + " " + name_of_activation(activation));
        ASSERT_NO_FATAL_FAILURE(check(activation, shape, x, dy));
      }
    }
  }
};

void expect_same(const Tensor& got, const Tensor& expected) {
  got.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_PRED2(same_bits, got.at(n, c, p), expected.at(n, c, p)) << n << ", " << c << ", " << p;
  });
}

TEST_P(ActivatedKernels, NormalizeAsSingleOperationsDo) {
  for_activations([](const ActivationFunction& activation, const Shape& shape, const Tensor& x,
                     const Tensor& residual) {
    Layer layer(kernels(), x);
    const Statistics statistics = layer.statistics.view().read_only();
    Tensor z = tensor(shape);
    kernels().normalize({}, x.view(), statistics, layer.with({}), {}, z.view());
    for (const bool adds : {false, true}) {
      if (adds && !activation.output_tells_gradient()) continue;
      Tensor expected = tensor(shape);
      z.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
        const double one = z.at(n, c, p);
        const double sum = adds ? element_sum(dtype(), one, residual.at(n, c, p)) : one;
        expected.set(n, c, p, activated(dtype(), activation, sum));
      });
      Tensor y = tensor(shape, {3, 2, 5});

      kernels().normalize(on_threads(2), x.view(), statistics, layer.with(activation),
                          adds ? residual.view() : TensorView{}, y.view());

      ASSERT_NO_FATAL_FAILURE(expect_same(y, expected));
      ASSERT_TRUE(y.untouched_outside(y.view().read_only()));
    }
  });
}

// dz as single operations would store it.
Tensor specified_dz(const Kernels& kernels, const ActivationFunction& activation, const Tensor& x,
                    const Tensor& dy, Layer& layer) {
  Tensor z(x.dtype(), x.view().layout(), x.samples(), x.channels(), x.positions());
  kernels.normalize({}, x.view(), layer.statistics.view().read_only(), layer.with({}), {},
                    z.view());
  Tensor dz = z;
  z.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    dz.set(n, c, p, activation_gradient(x.dtype(), activation, z.at(n, c, p), dy.at(n, c, p)));
  });
  return dz;
}

TEST_P(ActivatedKernels, FindTheGradientOfSingleOperationsFromInputsAndOutputs) {
  for_activations([](const ActivationFunction& activation, const Shape& shape, const Tensor& x,
                     const Tensor& dy) {
    Layer layer(kernels(), x);
    const Statistics statistics = layer.statistics.view().read_only();
    const Tensor expected = specified_dz(kernels(), activation, x, dy, layer);
    const auto expect_specified = [&](const Tensor& dz) {
      ASSERT_NO_FATAL_FAILURE(expect_same(dz, expected));
      ASSERT_TRUE(dz.untouched_outside(dz.view()));
    };
    Tensor of_input = tensor(shape, {3, 2, 5});
    Tensor of_output = of_input;

    kernels().activation_gradient(on_threads(2), x.view(), dy.view(), statistics,
                                  layer.with(activation), of_input.view());

    ASSERT_NO_FATAL_FAILURE(expect_specified(of_input));
    if (!activation.output_tells_gradient()) return;
    Tensor y = tensor(shape);
    kernels().normalize({}, x.view(), statistics, layer.with(activation), {}, y.view());

    kernels().gradient_of_output(on_threads(2), y.view().read_only(), dy.view(), activation,
                                 of_output.view());

    ASSERT_NO_FATAL_FAILURE(expect_specified(of_output));
  });
}

TEST_P(ActivatedKernels, SumAndApplyAGradientThatIsNeverStored) {
  for_activations([](const ActivationFunction& activation, const Shape& shape, const Tensor& x,
                     const Tensor& dy) {
    if (!activation.is_clip()) return;
    Layer layer(kernels(), x);
    const Statistics statistics = layer.statistics.view().read_only();
    const Tensor dz = specified_dz(kernels(), activation, x, dy, layer);
    OwnedLimbs expected(shape.channels);
    OwnedLimbs got(shape.channels);
    std::vector<double> sums(static_cast<std::size_t>(shape.channels), 0.5);
    const GradientSums views{sums.data(), sums.data()};
    Tensor expected_dx = tensor(shape);
    Tensor dx = tensor(shape, {3, 2, 5});

    kernels().add_gradient_sums({}, x.view(), dz.view(), statistics, {}, expected.view());
    kernels().input_gradient({}, x.view(), dz.view(), statistics, layer.with({}), views, 7.0,
                             expected_dx.view());
    kernels().add_gradient_sums(on_threads(2), x.view(), dy.view(), statistics,
                                layer.with(activation), got.view());
    kernels().input_gradient(on_threads(2), x.view(), dy.view(), statistics, layer.with(activation),
                             views, 7.0, dx.view());

    for (std::size_t i = 0; i < got.numbers().size(); ++i) {
      ASSERT_PRED2(same_bits, got.numbers()[i], expected.numbers()[i]) << "limb " << i;
    }
    ASSERT_NO_FATAL_FAILURE(expect_same(dx, expected_dx));
    ASSERT_TRUE(dx.untouched_outside(dx.view().read_only()));
  });
}

INSTANTIATE_TEST_SUITE_P(All, ActivatedKernels, combinations_of(kernels_with_equal_bits()),
                         name_of_combination);

}  // namespace
}  // namespace normscope::testing
