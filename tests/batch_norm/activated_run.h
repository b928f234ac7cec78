// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "tests/batch_norm/layer_run.h"
#include "tests/support/activation.h"

namespace normscope::testing {

// A layer followed by an activation.
struct Activated {
  ActivationFunction activation;
  bool adds = false;      // whether there is a residual
  bool writes_dz = true;  // or computes it on the fly, if it may
};

// All combinations that may follow a layer.
[[nodiscard]] inline std::vector<Activated> activated_layers(bool is_on_device) {
  std::vector<Activated> layers;
  for (const ActivationFunction& activation : kAllActivations) {
    layers.push_back({activation});
    if (!needs_dz(activation, false, is_on_device)) layers.push_back({activation, false, false});
    if (activation.output_tells_gradient()) layers.push_back({activation, true});
  }
  return layers;
}

// Compares a rank's step with the same step in single operations (the layer, the sum, the
// activation), each of which stores its output. The bits are the same.
inline void expect_single_operations(const Layer& layer, const Activated& activated_layer,
                                     const std::vector<std::int64_t>& samples, std::int64_t slices,
                                     const CallContext& context) {
  const auto& [activation, adds, writes_dz] = activated_layer;
  LayerRun single(layer, samples, slices);
  LayerRun run(layer, samples, slices);
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
  if (writes_dz) backward.dz = dz.view();
  batch_norm_backward(backward, context);

  batch_norm_forward(single.forward_arguments(), context);
  single.y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    const double z = single.y.at(n, c, p);
    const double sum = adds ? element_sum(layer.dtype, z, residual.at(n, c, p)) : z;
    ASSERT_PRED2(same_bits, run.y.at(n, c, p), activated(layer.dtype, activation, sum));
    single.dy.set(n, c, p,
                  activation_gradient(layer.dtype, activation, sum, single.dy.at(n, c, p)));
    if (!writes_dz) return;
    ASSERT_PRED2(same_bits, dz.at(n, c, p), single.dy.at(n, c, p));
  });
  batch_norm_backward(single.backward_arguments(), context);
  run.dx.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
    ASSERT_PRED2(same_bits, run.dx.at(n, c, p), single.dx.at(n, c, p));
  });
  ASSERT_EQ(run.statistics, single.statistics);
  ASSERT_EQ(run.dweight.values(), single.dweight.values());
  ASSERT_EQ(run.dbias.values(), single.dbias.values());
  ASSERT_EQ(run.running_mean.values(), single.running_mean.values());
  ASSERT_EQ(run.running_var.values(), single.running_var.values());
}

}  // namespace normscope::testing
