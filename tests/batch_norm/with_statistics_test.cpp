// SPDX-License-Identifier: Apache-2.0
//
// Forward's output recomputed from the statistics that it returned.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/support/execution.h"

namespace normscope::testing {
namespace {

WithStatisticsArguments apply_arguments(LayerRun& run, const MutableTensorView& y) {
  const ForwardArguments forward = run.forward_arguments();
  WithStatisticsArguments arguments;
  arguments.x = forward.x;
  arguments.y = y;
  arguments.weight = forward.weight;
  arguments.bias = forward.bias;
  arguments.statistics = forward.statistics;
  arguments.slices = forward.slices;
  return arguments;
}

void expect_apply_repeats_forward(const Layer& layer, std::int64_t slices) {
  LayerRun run(layer, first_samples(7), slices);
  batch_norm_forward(run.forward_arguments(), {});
  Tensor y = run.x;
  const Execution two_threads = on_threads(2);
  CallContext context;
  context.execution = &two_threads;

  batch_norm_with_statistics(apply_arguments(run, y.view()), context);

  run.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_PRED2(same_bits, y.at(n, c, p), run.y.at(n, c, p));
  });
}

TEST(Apply, RepeatsForwardToTheBit) {
  for (const DType dtype : kAllDTypes) {
    for (const Layout layout : kAllLayouts) {
      for (const Parameters parameters : {Parameters::kNone, Parameters::kFloat32}) {
        const Layer layer{.dtype = dtype, .layout = layout, .parameters = parameters};
        expect_apply_repeats_forward(layer, 1);
        expect_apply_repeats_forward(layer, 3);
      }
    }
  }
}

TEST(Apply, OfNoSamplesIsEmpty) { expect_apply_repeats_forward({.positions = 0}, 1); }

TEST(Apply, NamesTheArgumentWhatWasExpectedAndWhatWasGiven) {
  LayerRun run(Layer{}, first_samples(7));
  WithStatisticsArguments arguments = apply_arguments(run, run.y.view());
  arguments.slices = 5;

  EXPECT_THAT([&] { batch_norm_with_statistics(arguments, {}); },
              ::testing::ThrowsMessage<ArgumentError>(::testing::StartsWith("slices: expected ")));
}

}  // namespace
}  // namespace normscope::testing
