// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/batch_norm/moments.h"
#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/support/text_of.h"

namespace normscope::testing {

// The memory of a message, for sums that are added number by number.
class OwnedMessage {
 public:
  explicit OwnedMessage(std::int64_t channels, double value = 0.0)
      : channels_(channels),
        numbers_(static_cast<std::size_t>(limbs_size(channels) + kHeaderSize), value) {}

  [[nodiscard]] MessageView view() { return {numbers_.data(), channels_}; }
  [[nodiscard]] double count() { return view().header()[kCount]; }
  [[nodiscard]] const std::vector<double>& numbers() const { return numbers_; }

  OwnedMessage& operator+=(const OwnedMessage& other) {
    for (std::size_t i = 0; i < numbers_.size(); ++i) numbers_[i] += other.numbers_[i];
    return *this;
  }

 private:
  std::int64_t channels_;
  std::vector<double> numbers_;
};

// 7 samples in ragged parts, one of them empty.
inline Assignment parts_of_seven() { return {{0, 1, 2}, {}, {3}, {4, 5, 6}}; }

inline void expect_finalized(const LayerRun& whole, const std::vector<double>& statistics,
                             const LayerRun& run) {
  EXPECT_EQ(statistics, whole.statistics);
  EXPECT_EQ(run.running_mean.values(), whole.running_mean.values());
  EXPECT_EQ(run.running_var.values(), whole.running_var.values());
  EXPECT_EQ(run.updates, whole.updates);
}

// The statistics from batch_norm_finalize(), which also updates the run's running statistics.
inline std::vector<double> finalized(const Layer& layer, LayerRun& run, OwnedMessage& moments,
                                     const CallContext& context) {
  std::vector<double> statistics(static_cast<std::size_t>(statistics_size(1, layer.channels)));
  const ForwardArguments forward = run.forward_arguments();
  batch_norm_finalize({.moments = moments.view(),
                       .x_dtype = layer.dtype,
                       .eps = layer.eps,
                       .running = forward.running,
                       .statistics = statistics.data()},
                      context);
  return statistics;
}

// Wherever it runs, batch_norm_finalize() checks what it reads.
inline void expect_finalize_refusals(LayerRun& run, const CallContext& context) {
  const auto refusal = [&](const auto& change) {
    OwnedMessage moments(5);
    FinalizeArguments arguments{.moments = moments.view(),
                                .running = run.forward_arguments().running,
                                .statistics = run.statistics.data()};
    change(arguments);
    return text_of<ArgumentError>([&] { batch_norm_finalize(arguments, context); });
  };
  EXPECT_EQ(refusal([](auto& a) { a.eps = -1.0; }), "eps: expected at least 0, got -1");
  EXPECT_EQ(refusal([](auto& a) { a.statistics = nullptr; }),
            "statistics: expected memory for 15 numbers, got none");
  EXPECT_EQ(refusal([](auto& a) {
              a.running_average = RunningAverage::kCumulative;
              a.running.updates = nullptr;
            }),
            "running.updates: expected the number of updates so far for a cumulative average, got "
            "none");
}

// Parts of a norm batch in separate calls have the bits of one call for all of it.
inline void expect_parts_are_one_batch(const Layer& layer, const CallContext& context) {
  constexpr double kUnset = std::numeric_limits<double>::quiet_NaN();
  LayerRun whole(layer, first_samples(7));
  whole.step({});
  std::vector<LayerRun> parts;
  for (const std::vector<std::int64_t>& samples : parts_of_seven()) {
    parts.emplace_back(layer, samples);
  }

  OwnedMessage moments(layer.channels);
  for (LayerRun& part : parts) {
    OwnedMessage own(layer.channels, kUnset);
    batch_norm_moments(part.x.view().read_only(), own.view(), context);
    EXPECT_EQ(own.count(), static_cast<double>(part.x.view().read_only().elements_per_channel()));
    moments += own;
  }
  std::vector<double> statistics = finalized(layer, parts[0], moments, context);
  expect_finalized(whole, statistics, parts[0]);

  OwnedMessage sums(layer.channels);
  for (LayerRun& part : parts) {
    BackwardArguments backward = part.backward_arguments();
    OwnedMessage own(layer.channels, kUnset);
    batch_norm_part_gradient_sums({.x = backward.x,
                                   .dy = backward.dy,
                                   .statistics = statistics.data(),
                                   .sums = own.view(),
                                   .dweight = backward.dweight,
                                   .dbias = backward.dbias},
                                  context);
    sums += own;
    expect_own_gradients(part, layer, statistics);
  }
  for (LayerRun& part : parts) {
    BackwardArguments backward = part.backward_arguments();
    batch_norm_part_input_gradient({.x = backward.x,
                                    .dy = backward.dy,
                                    .dx = backward.dx,
                                    .weight = backward.weight,
                                    .statistics = statistics.data(),
                                    .sums = sums.view()},
                                   context);
    part.dx.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      const std::int64_t sample = part.samples[static_cast<std::size_t>(n)];
      ASSERT_EQ(part.dx.at(n, c, p), whole.dx.at(sample, c, p));
    });
  }
}

// Forwards that accumulate one after the other update running statistics as one forward does.
inline void expect_accumulated_is_one_update(const Layer& layer, const CallContext& context) {
  LayerRun whole(layer, first_samples(7));
  batch_norm_forward(whole.forward_arguments(), {});
  OwnedMessage moments(layer.channels);
  LayerRun updated(layer, {});
  for (const std::vector<std::int64_t>& samples : parts_of_seven()) {
    LayerRun part(layer, samples);
    if (static_cast<std::int64_t>(samples.size()) * layer.positions == 1) {
      // One value has no variance, but its moments can be accumulated.
      OwnedMessage own(layer.channels);
      batch_norm_moments(part.x.view().read_only(), own.view(), context);
      moments += own;
      continue;
    }
    ForwardArguments arguments = part.forward_arguments();
    arguments.running = {};
    arguments.accumulated = moments.view();
    batch_norm_forward(arguments, context);
  }
  const std::vector<double> statistics = finalized(layer, updated, moments, context);
  expect_finalized(whole, statistics, updated);
}

}  // namespace normscope::testing
