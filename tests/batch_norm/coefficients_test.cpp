// SPDX-License-Identifier: Apache-2.0
//
// Coefficients instead of outputs: a caller that applies the formulas gets the outputs' bits.
#include <cstddef>
#include <cstdint>

#include <gtest/gtest.h>

#include "normscope/core/cache_lines.h"
#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/comm/worlds.h"

namespace normscope::testing {
namespace {

// The coefficients of `formula` for channel c of a slice: numbers [slices, ., C].
template <class Formula, class Real>
Formula formula_of(const AlignedVector<Real>& numbers, std::int64_t slice, std::int64_t channels,
                   std::int64_t c) {
  constexpr auto kNumbers = static_cast<std::int64_t>(sizeof(Formula) / sizeof(Real));
  Formula formula;
  auto* to = reinterpret_cast<Real*>(&formula);
  for (std::int64_t i = 0; i < kNumbers; ++i) {
    to[i] = numbers[static_cast<std::size_t>((slice * kNumbers + i) * channels + c)];
  }
  return formula;
}

template <class Element>
double rounded(Arithmetic<Element> value) {
  return static_cast<double>(widen(narrow<Element>(value)));
}

// A step that applies nothing, next to one that does.
template <class Element>
void expect_outputs_follow_from_coefficients(const Layer& layer, std::int64_t slices,
                                             const CallContext& context) {
  using Real = Arithmetic<Element>;
  LayerRun whole(layer, first_samples(kFewSamples), slices);
  LayerRun bare(layer, first_samples(kFewSamples), slices);
  const auto channels = static_cast<std::size_t>(layer.channels * slices);
  AlignedVector<Real> of_y(Coefficients::kNormalize * channels);
  AlignedVector<Real> of_dx(Coefficients::kInputGradient * channels);
  ForwardArguments forward = bare.forward_arguments();
  forward.y.data = nullptr;
  forward.coefficients = {of_y.data()};
  BackwardArguments backward = bare.backward_arguments();
  backward.dx.data = nullptr;
  backward.coefficients = {of_dx.data()};

  whole.step(context);
  batch_norm_forward(forward, context);
  batch_norm_backward(backward, context);

  EXPECT_EQ(bare.statistics, whole.statistics);
  EXPECT_EQ(bare.counts, whole.counts);
  EXPECT_EQ(bare.running_mean.values(), whole.running_mean.values());
  EXPECT_EQ(bare.dweight.values(), whole.dweight.values());
  EXPECT_EQ(bare.dbias.values(), whole.dbias.values());
  const std::int64_t slice_size = (kFewSamples + slices - 1) / slices;
  whole.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    const auto x = static_cast<Real>(whole.x.at(n, c, p));
    const auto dy = static_cast<Real>(whole.dy.at(n, c, p));
    const std::int64_t slice = n / slice_size;
    const auto normalize = formula_of<Normalize<Real>>(of_y, slice, layer.channels, c);
    const auto input_gradient = formula_of<InputGradient<Real>>(of_dx, slice, layer.channels, c);
    ASSERT_PRED2(same_bits, whole.y.at(n, c, p), rounded<Element>(normalize(x)));
    ASSERT_PRED2(same_bits, whole.dx.at(n, c, p), rounded<Element>(input_gradient(x, dy)));
  });
}

void expect_of_every_layer(std::int64_t slices, const CallContext& context) {
  for (const DType dtype : kAllDTypes) {
    for (const Layout layout : kAllLayouts) {
      for (const Parameters parameters : {Parameters::kNone, Parameters::kFloat32}) {
        with_element_type(dtype, [&]<class Element>(Element*) {
          expect_outputs_follow_from_coefficients<Element>(
              {.dtype = dtype, .layout = layout, .parameters = parameters}, slices, context);
        });
      }
    }
  }
}

TEST(Coefficients, GiveTheOutputsToTheBit) {
  for (const std::int64_t slices : {1, 3}) expect_of_every_layer(slices, {});
}

TEST(Coefficients, AreThoseOfAllRanks) {
  run_as_threads(3, {}, [](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);

    expect_of_every_layer(1, context_of(&exchange));
  });
}

}  // namespace
}  // namespace normscope::testing
