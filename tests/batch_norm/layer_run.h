// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "normscope/batch_norm/batch_norm.h"
#include "tests/comm/borrowed_communicator.h"
#include "tests/comm/worlds.h"
#include "tests/support/inputs.h"
#include "tests/support/tensor.h"

namespace normscope::testing {

enum class Parameters { kNone, kFloat32, kLikeInput };

// A layer and its input.
struct Layer {
  DType dtype = DType::kFloat32;
  Layout layout = Layout::kChannelsFirst;
  std::int64_t channels = 5;
  std::int64_t positions = 70;
  Inputs inputs = Inputs::kMeanOf1e3Deviations;
  Parameters parameters = Parameters::kFloat32;
  DType buffers = DType::kFloat32;
  double eps = 1e-5;
  double momentum = 0.1;
};

// Each of these layers with every dtype and layout. Buffers have the type of the parameters.
[[nodiscard]] inline std::vector<Layer> with_every_type(const std::vector<Layer>& layers) {
  std::vector<Layer> all;
  for (const DType dtype : kAllDTypes) {
    for (const Layout layout : kAllLayouts) {
      for (Layer layer : layers) {
        layer.dtype = dtype;
        layer.layout = layout;
        if (layer.parameters == Parameters::kLikeInput) layer.buffers = dtype;
        all.push_back(layer);
      }
    }
  }
  return all;
}

// Numbers of samples in a batch. The first is not a multiple of 5, as uneven_and_permuted requires.
inline constexpr std::int64_t kSamples = 24;
inline constexpr std::int64_t kFewSamples = 7;

// One rank's step of a layer: some samples of the whole batch, and all results.
class LayerRun {
 public:
  LayerRun(const Layer& layer, std::vector<std::int64_t> own_samples, std::int64_t slices = 1)
      : samples(std::move(own_samples)),
        x(tensor(layer, samples)),
        dy(x),
        y(x),
        dx(x),
        weight(parameter_dtype(layer), layer.channels, 1.0),
        bias(parameter_dtype(layer), layer.channels, 0.0),
        dweight(parameter_dtype(layer), layer.channels, 0.0),
        dbias(parameter_dtype(layer), layer.channels, 0.0),
        running_mean(layer.buffers, layer.channels, 0.5),
        running_var(layer.buffers, layer.channels, 2.0),
        statistics(static_cast<std::size_t>(statistics_size(slices, layer.channels))),
        counts(static_cast<std::size_t>(slices)),
        layer_(layer),
        slices_(slices) {
    fill(x, layer.inputs, Role::kX, samples);
    fill(dy, Inputs::kCentred, Role::kDy, samples);
    if (layer.parameters == Parameters::kNone) return;
    for (std::int64_t c = 0; c < layer.channels; ++c) {
      weight.set(c, 1.5 + input_at(Inputs::kCentred, layer.dtype, Role::kParameters, 0, c, 0));
      bias.set(c, input_at(Inputs::kCentred, layer.dtype, Role::kParameters, 1, c, 0));
    }
  }

  [[nodiscard]] ForwardArguments forward_arguments() {
    const bool affine = layer_.parameters != Parameters::kNone;
    ForwardArguments arguments;
    arguments.x = x.view().read_only();
    arguments.y = y.view();
    if (affine) arguments.weight = std::as_const(weight).view();
    if (affine) arguments.bias = std::as_const(bias).view();
    arguments.running = {running_mean.view(), running_var.view(), layer_.momentum, updates.data()};
    arguments.eps = layer_.eps;
    arguments.slices = slices_;
    arguments.statistics = statistics.data();
    arguments.counts = counts.data();
    return arguments;
  }

  [[nodiscard]] BackwardArguments backward_arguments() {
    const bool affine = layer_.parameters != Parameters::kNone;
    BackwardArguments arguments;
    arguments.x = x.view().read_only();
    arguments.dy = dy.view().read_only();
    arguments.dx = dx.view();
    arguments.statistics = statistics.data();
    arguments.slices = slices_;
    if (affine) arguments.weight = std::as_const(weight).view();
    if (affine) arguments.dweight = dweight.view();
    if (affine) arguments.dbias = dbias.view();
    return arguments;
  }

  void step(const CallContext& context, SliceStats slice_stats = SliceStats::kPooled,
            RunningAverage running_average = RunningAverage::kExponential) {
    ForwardArguments forward = forward_arguments();
    forward.slice_stats = slice_stats;
    forward.running_average = running_average;
    batch_norm_forward(forward, context);
    batch_norm_backward(backward_arguments(), context);
  }

  std::vector<std::int64_t> samples;  // their numbers in the whole batch
  Tensor x;
  Tensor dy;
  Tensor y;
  Tensor dx;
  ChannelArray weight;
  ChannelArray bias;
  ChannelArray dweight;
  ChannelArray dbias;
  ChannelArray running_mean;
  ChannelArray running_var;
  std::vector<std::int64_t> updates = {3};  // [1] made by earlier calls
  std::vector<double> statistics;
  std::vector<double> counts;

 private:
  static Tensor tensor(const Layer& layer, std::span<const std::int64_t> samples) {
    return {layer.dtype, layer.layout, static_cast<std::int64_t>(samples.size()), layer.channels,
            layer.positions};
  }
  static DType parameter_dtype(const Layer& layer) {
    return layer.parameters == Parameters::kLikeInput ? layer.dtype : DType::kFloat32;
  }

  Layer layer_;
  std::int64_t slices_;
};

inline void expect_same(const LayerRun& run, const LayerRun& expected) {
  EXPECT_EQ(run.statistics, expected.statistics);
  EXPECT_EQ(run.counts, expected.counts);
  EXPECT_EQ(run.updates, expected.updates);
  EXPECT_EQ(run.running_mean.values(), expected.running_mean.values());
  EXPECT_EQ(run.running_var.values(), expected.running_var.values());
  EXPECT_EQ(run.dweight.values(), expected.dweight.values());
  EXPECT_EQ(run.dbias.values(), expected.dbias.values());
  run.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_PRED2(same_bits, run.y.at(n, c, p), expected.y.at(n, c, p));
    ASSERT_PRED2(same_bits, run.dx.at(n, c, p), expected.dx.at(n, c, p));
  });
}

// Compares a rank's results with those of one rank that has all samples.
inline void expect_equal_bits(const LayerRun& run, const LayerRun& whole) {
  EXPECT_EQ(run.statistics, whole.statistics);
  EXPECT_EQ(run.counts, whole.counts);
  EXPECT_EQ(run.running_mean.values(), whole.running_mean.values());
  EXPECT_EQ(run.running_var.values(), whole.running_var.values());
  run.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    const std::int64_t sample = run.samples[static_cast<std::size_t>(n)];
    ASSERT_PRED2(same_bits, run.y.at(n, c, p), whole.y.at(sample, c, p));
    ASSERT_PRED2(same_bits, run.dx.at(n, c, p), whole.dx.at(sample, c, p));
  });
}

// Compares the gradients of parameters with those of a call alone, with these statistics. They are
// sums over the run's own samples, whoever shares its statistics.
inline void expect_own_gradients(const LayerRun& run, const Layer& layer,
                                 const std::vector<double>& statistics) {
  LayerRun alone(layer, run.samples);
  BackwardArguments arguments = alone.backward_arguments();
  arguments.statistics = statistics.data();
  batch_norm_backward(arguments, {});
  EXPECT_EQ(run.dweight.values(), alone.dweight.values());
  EXPECT_EQ(run.dbias.values(), alone.dbias.values());
}

[[nodiscard]] inline bool is_last(const Exchange& exchange) {
  return is_last(exchange.communicator());
}

[[nodiscard]] inline Exchange exchange_over(Communicator& communicator) {
  return Exchange(std::make_unique<BorrowedCommunicator>(communicator));
}

[[nodiscard]] inline CallContext context_of(Exchange* exchange) {
  CallContext context;
  context.exchange = exchange;
  context.layer = "block.bn";
  context.scope = "world";
  return context;
}

// Which samples of a batch each rank has.
using Assignment = std::vector<std::vector<std::int64_t>>;

// Nearly equal parts in order.
[[nodiscard]] inline Assignment in_order(std::int64_t samples, int ranks) {
  Assignment assignment(static_cast<std::size_t>(ranks));
  for (std::int64_t n = 0; n < samples; ++n) {
    assignment[static_cast<std::size_t>(n * ranks / samples)].push_back(n);
  }
  return assignment;
}

// Permuted. Rank r has about r times as many samples as rank 1; rank 0 of several has none.
[[nodiscard]] inline Assignment uneven_and_permuted(std::int64_t samples, int ranks) {
  if (ranks == 1) return in_order(samples, ranks);
  Assignment assignment(static_cast<std::size_t>(ranks));
  const std::int64_t shares = ranks * (ranks - 1) / 2;
  for (std::int64_t i = 0; i < samples; ++i) {
    std::int64_t rank = 1;
    while (i * shares / samples >= rank * (rank + 1) / 2) ++rank;
    const std::int64_t n = i * 5 % samples;  // a permutation: 5 must not divide `samples`
    assignment[static_cast<std::size_t>(rank)].push_back(n);
  }
  return assignment;
}

}  // namespace normscope::testing
