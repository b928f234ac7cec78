// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/support/execution.h"

namespace normscope::testing {
namespace {

// kFewSamples are slices of 3, 3 and 1.
constexpr std::int64_t kSlices = 3;

Assignment slices_of_seven() { return {{0, 1, 2}, {3, 4, 5}, {6}}; }

TEST(SliceCount, IsThatOfTorchChunk) {
  EXPECT_EQ(slice_count(8, 4), 4);
  EXPECT_EQ(slice_count(7, 3), 3);
  EXPECT_EQ(slice_count(5, 4), 3);  // 2, 2, 1
  EXPECT_EQ(slice_count(3, 8), 3);
  EXPECT_EQ(slice_count(0, 4), 1);
  EXPECT_THROW((void)slice_count(4, 0), ArgumentError);
}

TEST(SliceCount, OfAnyWantedNumberIsAtMostTheSamples) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t samples : {std::int64_t{1}, std::int64_t{7}, kMost / 2, kMost}) {
    for (const std::int64_t wanted : {kMost, kMost - 1, kMost - samples, kMost - samples + 1}) {
      if (wanted < samples) continue;
      EXPECT_EQ(slice_count(samples, wanted), samples) << samples << " in " << wanted;
    }
  }
  EXPECT_EQ(slice_count(kMost, 2), 2);
  EXPECT_EQ(slice_count(0, kMost), 1);
}

class Slices : public ::testing::TestWithParam<Layout> {
 protected:
  // Each slice as a batch of its own.
  static std::vector<LayerRun> separate_runs(const Layer& layer) {
    std::vector<LayerRun> runs;
    for (const std::vector<std::int64_t>& samples : slices_of_seven()) {
      runs.emplace_back(layer, samples).step({});
    }
    return runs;
  }
};

TEST_P(Slices, AreNormBatchesOfTheirOwn) {
  const Layer layer{.layout = GetParam()};
  const std::vector<LayerRun> expected = separate_runs(layer);
  for (const int threads : {1, 2}) {
    const Execution execution = on_threads(threads);
    LayerRun run(layer, first_samples(kFewSamples), kSlices);
    CallContext context;
    context.execution = &execution;

    run.step(context);

    EXPECT_EQ(run.counts, (std::vector<double>{3 * 70, 3 * 70, 70}));
    for (std::int64_t n = 0; n < kFewSamples; ++n) {
      const LayerRun& slice = expected[static_cast<std::size_t>(n / 3)];
      for (std::int64_t c = 0; c < layer.channels; ++c) {
        for (std::int64_t p = 0; p < layer.positions; ++p) {
          ASSERT_EQ(run.y.at(n, c, p), slice.y.at(n % 3, c, p));
          ASSERT_EQ(run.dx.at(n, c, p), slice.dx.at(n % 3, c, p));
        }
      }
    }
    for (std::int64_t c = 0; c < layer.channels; ++c) {
      double dweight = 0.0;
      double dbias = 0.0;
      for (const LayerRun& slice : expected) {
        dweight += slice.dweight[c];
        dbias += slice.dbias[c];
      }
      EXPECT_NEAR(run.dweight[c], dweight, 1e-5 * std::abs(dweight));
      EXPECT_NEAR(run.dbias[c], dbias, 1e-5 * std::abs(dbias));
    }
  }
}

// One call of the layer after the other, on the same running statistics.
LayerRun in_sequence(const Layer& layer, const Assignment& batches, RunningAverage average) {
  LayerRun last(layer, batches.front());
  last.step({}, SliceStats::kPooled, average);
  for (const std::vector<std::int64_t>& batch : std::span(batches).subspan(1)) {
    LayerRun next(layer, batch);
    next.running_mean = last.running_mean;
    next.running_var = last.running_var;
    next.updates = last.updates;
    next.step({}, SliceStats::kPooled, average);
    last = std::move(next);
  }
  return last;
}

TEST_P(Slices, UpdateTheRunningStatisticsTogetherOrByTheFirstOrInSequence) {
  const Layer layer{.layout = GetParam()};
  const Assignment slices = slices_of_seven();
  const std::vector<std::pair<SliceStats, Assignment>> batches{
      {SliceStats::kPooled, {first_samples(kFewSamples)}},
      {SliceStats::kFirst, {slices.front()}},
      {SliceStats::kSequential, slices}};
  for (const RunningAverage average : {RunningAverage::kExponential, RunningAverage::kCumulative}) {
    for (const auto& [slice_stats, counted] : batches) {
      const LayerRun expected = in_sequence(layer, counted, average);
      LayerRun run(layer, first_samples(kFewSamples), kSlices);

      run.step({}, slice_stats, average);

      EXPECT_EQ(run.running_mean.values(), expected.running_mean.values());
      EXPECT_EQ(run.running_var.values(), expected.running_var.values());
      EXPECT_EQ(run.updates, expected.updates);
    }
  }
}

// Enough channels for two threads.
TEST_P(Slices, AreTheSameWithMoreThreads) {
  const Layer wide{.layout = GetParam(), .channels = 1024, .positions = 11};
  const Execution two_threads = on_threads(2);
  CallContext context;
  context.execution = &two_threads;
  for (const SliceStats slice_stats :
       {SliceStats::kPooled, SliceStats::kFirst, SliceStats::kSequential}) {
    LayerRun expected(wide, first_samples(kFewSamples), kSlices);
    // A cumulative average depends on the number of updates.
    expected.step({}, slice_stats, RunningAverage::kCumulative);
    LayerRun run(wide, first_samples(kFewSamples), kSlices);

    run.step(context, slice_stats, RunningAverage::kCumulative);

    ASSERT_NO_FATAL_FAILURE(expect_same(run, expected));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Slices, ::testing::ValuesIn(kAllLayouts),
                         [](const auto& layout) { return name_of(layout.param); });

}  // namespace
}  // namespace normscope::testing
