// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/moments.h"

#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/batch_norm/parts_run.h"

namespace normscope::testing {
namespace {

// The moments that a forward of slices has accumulated, finalized.
std::vector<double> accumulated_from_slices(const Layer& layer, SliceStats slice_stats) {
  LayerRun run(layer, first_samples(7), /*slices=*/3);
  OwnedMessage moments(layer.channels);
  ForwardArguments arguments = run.forward_arguments();
  arguments.slice_stats = slice_stats;
  arguments.accumulated = moments.view();
  batch_norm_forward(arguments, {});
  return finalized(layer, run, moments, {});
}

TEST(Parts, HaveTheBitsOfOneBatch) {
  for (const Layer& layer : with_every_type({{.positions = 70}, {.positions = 1}})) {
    ASSERT_NO_FATAL_FAILURE(expect_parts_are_one_batch(layer, {}));
    ASSERT_NO_FATAL_FAILURE(expect_accumulated_is_one_update(layer, {}));
  }
}

TEST(AccumulatedSlices, AreAllOfThemOrTheFirst) {
  const Layer layer;
  LayerRun all(layer, first_samples(7));
  batch_norm_forward(all.forward_arguments(), {});
  LayerRun first(layer, first_samples(3));
  batch_norm_forward(first.forward_arguments(), {});

  EXPECT_EQ(accumulated_from_slices(layer, SliceStats::kPooled), all.statistics);
  EXPECT_EQ(accumulated_from_slices(layer, SliceStats::kSequential), all.statistics);
  EXPECT_EQ(accumulated_from_slices(layer, SliceStats::kFirst), first.statistics);
}

TEST(Finalize, WeighsAllUpdatesEqually) {
  const Layer layer{.dtype = DType::kFloat64, .buffers = DType::kFloat64};
  LayerRun expected(layer, first_samples(7));
  ForwardArguments forward = expected.forward_arguments();
  forward.running_average = RunningAverage::kCumulative;
  batch_norm_forward(forward, {});
  LayerRun run(layer, first_samples(7));
  OwnedMessage moments(layer.channels);
  batch_norm_moments(run.x.view().read_only(), moments.view(), {});
  FinalizeArguments arguments{.moments = moments.view(),
                              .x_dtype = layer.dtype,
                              .running = run.forward_arguments().running,
                              .running_average = RunningAverage::kCumulative,
                              .statistics = run.statistics.data()};

  batch_norm_finalize(arguments, {});

  EXPECT_EQ(run.running_mean.values(), expected.running_mean.values());
  EXPECT_EQ(run.updates, expected.updates);
}

TEST(Finalize, ThrowsWhereThereIsOneValue) {
  const Layer layer{.positions = 1};
  LayerRun run(layer, first_samples(1));
  OwnedMessage moments(layer.channels);
  batch_norm_moments(run.x.view().read_only(), moments.view(), {});

  EXPECT_THROW((void)finalized(layer, run, moments, {}), OneValueError);

  EXPECT_EQ(run.running_mean.values(), std::vector<double>(5, 0.5));
}

TEST(PartErrors, NameTheArgument) {
  LayerRun run(Layer{}, first_samples(2));
  expect_finalize_refusals(run, {});
  OwnedMessage other(4);
  const BackwardArguments backward = run.backward_arguments();

  EXPECT_THROW(batch_norm_moments(backward.x, other.view(), {}), ArgumentError);
  EXPECT_THROW(batch_norm_moments(backward.x, {}, {}), ArgumentError);
  EXPECT_THROW(batch_norm_finalize(FinalizeArguments{}, {}), ArgumentError);
  EXPECT_THROW(batch_norm_part_gradient_sums({.x = backward.x,
                                              .dy = backward.dy,
                                              .statistics = run.statistics.data(),
                                              .sums = other.view()},
                                             {}),
               ArgumentError);
  EXPECT_THROW(batch_norm_part_input_gradient({.x = backward.x,
                                               .dy = backward.dy,
                                               .dx = backward.dx,
                                               .statistics = run.statistics.data(),
                                               .sums = other.view()},
                                              {}),
               ArgumentError);
}

}  // namespace
}  // namespace normscope::testing
