// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "tests/batch_norm/layer_run.h"
#include "tests/support/activation.h"

namespace normscope::testing {

// A layer followed by an activation, perhaps after the sum with a residual.
struct Activated {
  ActivationFunction activation;
  bool adds;
};

// All combinations that may follow a layer.
inline std::vector<Activated> activated_layers() {
  std::vector<Activated> layers;
  for (const ActivationFunction& activation : kAllActivations) {
    layers.push_back({.activation = activation, .adds = false});
    if (!activation.output_tells_gradient()) continue;
    layers.push_back({.activation = activation, .adds = true});
  }
  return layers;
}

// Compares a rank's step with the same step in single operations (the layer, the sum, the
// activation), each of which stores its output. The bits are the same.
inline void expect_single_operations(const Layer& layer, const Activated& activated_layer,
                                     const std::vector<std::int64_t>& samples,
                                     const CallContext& context) {
  const auto& [activation, adds] = activated_layer;
  LayerRun single(layer, samples);
  LayerRun run(layer, samples);
  Tensor residual = run.x;
  fill(residual, Inputs::kCentred, Role::kParameters, samples);
  Tensor dz = run.x;

  ForwardArguments forward = run.forward_arguments();
  forward.activation = activation;
  if (adds) forward.residual = residual.view().read_only();
  batch_norm_forward(forward, context);
  BackwardArguments backward = run.backward_arguments();
  backward.activation = activation;
  backward.bias = forward.bias;
  if (adds) backward.y = run.y.view().read_only();
  backward.dz = dz.view();
  batch_norm_backward(backward, context);

  batch_norm_forward(single.forward_arguments(), context);
  single.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    const double z = single.y.at(n, c, p);
    const double sum = adds ? element_sum(layer.dtype, z, residual.at(n, c, p)) : z;
    ASSERT_PRED2(same_bits, run.y.at(n, c, p), activated(layer.dtype, activation, sum));
    single.dy.set(n, c, p,
                  activation_gradient(layer.dtype, activation, sum, single.dy.at(n, c, p)));
    ASSERT_PRED2(same_bits, dz.at(n, c, p), single.dy.at(n, c, p));
  });
  batch_norm_backward(single.backward_arguments(), context);
  run.dx.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_PRED2(same_bits, run.dx.at(n, c, p), single.dx.at(n, c, p));
  });
  EXPECT_EQ(run.statistics, single.statistics);
  EXPECT_EQ(run.dweight.values(), single.dweight.values());
  EXPECT_EQ(run.dbias.values(), single.dbias.values());
  EXPECT_EQ(run.running_mean.values(), single.running_mean.values());
  EXPECT_EQ(run.running_var.values(), single.running_var.values());
}

}  // namespace normscope::testing
