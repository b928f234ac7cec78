// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward against the oracle, on the joined batch of all ranks.
#include "tests/support/oracle.h"

#include <cmath>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/batch_norm/layer_run.h"
#include "tests/comm/worlds.h"
#include "tests/support/tolerance.h"

namespace normscope::testing {
namespace {

void expect_near(double got, long double expected, long double tolerance) {
  ASSERT_LE(std::abs(static_cast<long double>(got) - expected), tolerance)
      << "got " << got << ", expected " << static_cast<double>(expected);
}

// Checks channel c of a rank's run against the whole batch.
void check_channel(const Layer& layer, LayerRun& run, const LayerRun& whole, std::int64_t c) {
  const NormBatch batch{&whole.x};
  const ChannelMoments moments = moments_of(batch, c);
  const StatisticsError error = statistics_error(layer.dtype, moments, layer.eps);
  const long double inv_std = moments.inv_std(layer.eps);
  const Affine affine{run.weight[c], run.bias[c]};
  const ChannelGradients gradients = gradients_of(batch, {&whole.dy}, c, moments, inv_std);
  const GradientError sums = gradient_error(layer.dtype, gradients, inv_std, error);

  const long double momentum = layer.momentum;
  const long double running_mean = 0.5L + momentum * (moments.mean - 0.5L);
  const long double running_var = 2.0L + momentum * (moments.sample_variance() - 2.0L);
  expect_near(
      run.running_mean[c], running_mean,
      error.mean + 0x1p-50L * moments.largest + output_rounding(layer.buffers, running_mean));
  expect_near(run.running_var[c], running_var,
              2 * error.variance + 0x1p-50L * (2.0L + moments.sample_variance()) +
                  output_rounding(layer.buffers, running_var));

  run.x.for_each([&](std::int64_t n, std::int64_t channel, std::int64_t p) {
    if (channel != c) return;
    const double x = run.x.at(n, c, p);
    const double dy = run.dy.at(n, c, p);
    const long double xhat = moments.deviation(x) * inv_std;
    expect_near(run.y.at(n, c, p), normalized(moments, layer.eps, affine, x),
                y_error(layer.dtype, moments, layer.eps, affine, error, x));
    expect_near(run.dx.at(n, c, p), input_gradient(gradients, affine.weight, inv_std, xhat, dy),
                dx_error(layer.dtype, gradients, affine.weight, inv_std, xhat, dy, error, sums));
  });

  if (layer.parameters == Parameters::kNone) return;
  // This rank's samples only.
  const ChannelGradients own = gradients_of({&run.x}, {&run.dy}, c, moments, inv_std);
  const GradientError own_error = gradient_error(layer.dtype, own, inv_std, error);
  const DType dtype = layer.parameters == Parameters::kLikeInput ? layer.dtype : DType::kFloat32;
  expect_near(run.dbias[c], own.dy, own_error.dy + output_rounding(dtype, own.dy));
  expect_near(run.dweight[c], own.dy_xhat, own_error.dy_xhat + output_rounding(dtype, own.dy_xhat));
}

void check_step(const Layer& layer, const std::vector<std::int64_t>& samples, Exchange* exchange) {
  const LayerRun whole(layer, first_samples(kSamples));
  LayerRun run(layer, samples);

  run.step(context_of(exchange));

  EXPECT_EQ(run.counts[0], static_cast<double>(kSamples * layer.positions));
  for (std::int64_t c = 0; c < layer.channels; ++c) {
    ASSERT_NO_FATAL_FAILURE(check_channel(layer, run, whole, c)) << "channel " << c;
  }
}

// All types and layouts, with the parameters and buffers that belong to them.
std::vector<Layer> shaped_layers() {
  std::vector<Layer> layers;
  for (const DType dtype : kAllDTypes) {
    for (const Layout layout : kAllLayouts) {
      for (const Parameters parameters :
           {Parameters::kNone, Parameters::kFloat32, Parameters::kLikeInput}) {
        for (const Inputs inputs : {Inputs::kMeanOf1e3Deviations, Inputs::kPaddedCorner}) {
          const DType buffers = parameters == Parameters::kLikeInput ? dtype : DType::kFloat32;
          layers.push_back({.dtype = dtype,
                            .layout = layout,
                            .inputs = inputs,
                            .parameters = parameters,
                            .buffers = buffers});
        }
      }
    }
  }
  return layers;
}

TEST(BatchNormOracle, ARankAloneAgrees) {
  for (const Layer& layer : shaped_layers()) {
    for (const std::int64_t positions : {1, 70}) {
      Layer shaped = layer;
      shaped.positions = positions;
      check_step(shaped, first_samples(kSamples), nullptr);
    }
  }
}

class BatchNormWorld : public ::testing::TestWithParam<World> {};

TEST_P(BatchNormWorld, AgreesOnUnevenRanksWithAndWithoutSamples) {
  const World& world = GetParam();
  world.run(world.ranks, {}, [&](Communicator& communicator) {
    Exchange exchange = exchange_over(communicator);
    const auto rank = static_cast<std::size_t>(communicator.rank());
    for (const Layer& layer : shaped_layers()) {
      const Assignment assignment = uneven_and_permuted(kSamples, world.ranks);
      check_step(layer, assignment[rank], &exchange);
    }
  });
}

// Other worlds have the same bits.
INSTANTIATE_TEST_SUITE_P(Threads, BatchNormWorld, worlds({3}, run_as_threads), ranks_of);

// A few units of float32 in the statistics and in y, for means up to 1e4 deviations. The rounding
// errors of the many short chains are independent, so the mean of all tiles is better than one
// tile: 4 u for y / scale and 4 u for the variance, relative, on these inputs.
class Accuracy : public ::testing::TestWithParam<std::tuple<double, Layout>> {};

TEST_P(Accuracy, StaysWithinAFewUnitsOfFloat32) {
  constexpr long double kUnit = 0x1p-23L;
  const auto& [mean, layout] = GetParam();
  const Layer layer{.layout = layout, .channels = 3, .positions = 5000, .eps = 0.0};
  LayerRun run(layer, first_samples(4));
  run.x.for_each([&, offset = mean](std::int64_t n, std::int64_t c, std::int64_t p) {
    run.x.set(n, c, p, offset + input_at(Inputs::kCentred, layer.dtype, Role::kX, n, c, p));
  });

  batch_norm_forward(run.forward_arguments(), {});

  for (std::int64_t c = 0; c < layer.channels; ++c) {
    const ChannelMoments moments = moments_of({&run.x}, c);
    const auto i = static_cast<std::size_t>(c);
    const long double std_deviation = std::sqrt(moments.variance);
    expect_near(run.statistics[i] + run.statistics[i + 3], moments.mean, 4 * kUnit * std_deviation);
    expect_near(run.statistics[i + 6], moments.inv_std(0.0), 4 * kUnit * moments.inv_std(0.0));
    const Affine affine{run.weight[c], run.bias[c]};
    for (std::int64_t p = 0; p < layer.positions; ++p) {
      const double x = run.x.at(0, c, p);
      const long double y = normalized(moments, 0.0, affine, x);
      // Four units of the largest summand: the centred product, the bias, and the weight for the
      // error of the mean.
      const long double size = std::abs(y) + 2 * std::abs(static_cast<long double>(affine.bias)) +
                               std::abs(static_cast<long double>(affine.weight));
      expect_near(run.y.at(0, c, p), y, 4 * kUnit * size);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Means, Accuracy,
                         ::testing::Combine(::testing::Values(0.0, 1e2, 1e4, 1e6),
                                            ::testing::ValuesIn(kAllLayouts)));

}  // namespace
}  // namespace normscope::testing
