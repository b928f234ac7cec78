// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward of a rank alone against the oracle. Ranks have the bits of one rank.
#include <cmath>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/batch_norm/layer_run.h"
#include "tests/support/tolerance.h"

namespace normscope::testing {
namespace {

void check_channel(const Layer& layer, LayerRun& run, std::int64_t c) {
  const ChannelOracle oracle = oracle_of(run.x, run.dy, c, layer.eps);
  const ChannelMoments& moments = oracle.moments;
  const ChannelGradients& gradients = oracle.gradients;
  const long double momentum = layer.momentum;
  const long double running_mean = 0.5L + momentum * (moments.mean - 0.5L);
  const long double running_var = 2.0L + momentum * (moments.sample_variance() - 2.0L);
  expect_near(run.running_mean[c], running_mean,
              oracle.error.mean + 0x1p-50L * moments.largest +
                  output_rounding(layer.buffers, running_mean));
  expect_near(run.running_var[c], running_var,
              2 * oracle.error.variance + 0x1p-50L * (2.0L + moments.sample_variance()) +
                  output_rounding(layer.buffers, running_var));

  oracle.expect_outputs(run.x, run.dy, {run.weight[c], run.bias[c]}, run.y, run.dx);
  if (layer.parameters == Parameters::kNone) return;
  const DType dtype = layer.parameters == Parameters::kLikeInput ? layer.dtype : DType::kFloat32;
  expect_near(run.dbias[c], gradients.dy,
              oracle.sums_error.dy + output_rounding(dtype, gradients.dy));
  expect_near(run.dweight[c], gradients.dy_xhat,
              oracle.sums_error.dy_xhat + output_rounding(dtype, gradients.dy_xhat));
}

TEST(BatchNormOracle, ARankAloneAgrees) {
  std::vector<Layer> layers;
  for (const Parameters parameters :
       {Parameters::kNone, Parameters::kFloat32, Parameters::kLikeInput}) {
    for (const Inputs inputs : {Inputs::kMeanOf1e3Deviations, Inputs::kPaddedCorner}) {
      for (const std::int64_t positions : {1, 70}) {
        layers.push_back({.positions = positions, .inputs = inputs, .parameters = parameters});
      }
    }
  }
  for (const Layer& layer : with_every_type(layers)) {
    LayerRun run(layer, first_samples(kSamples));

    run.step({});

    EXPECT_EQ(run.counts[0], static_cast<double>(kSamples * layer.positions));
    for (std::int64_t c = 0; c < layer.channels; ++c) {
      ASSERT_NO_FATAL_FAILURE(check_channel(layer, run, c)) << "channel " << c;
    }
  }
}

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
    const ChannelMoments moments = moments_of(run.x, c);
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
