// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/layer_run.h"

namespace normscope::testing {
namespace {

// An activation after a sum, whose gradient cannot be computed from its output.
TEST(ActivatedLayerRefuses, AResidualThatBackwardCouldNotFind) {
  LayerRun run(Layer{}, first_samples(4));
  ForwardArguments arguments = run.forward_arguments();
  arguments.activation = {Activation::kSilu};
  arguments.residual = run.dy.view().read_only();

  EXPECT_THAT([&] { batch_norm_forward(arguments, {}); },
              ::testing::ThrowsMessage<ArgumentError>(::testing::StartsWith("residual: expected")));
}

// Outputs are written in vectors that overlap, from inputs that are read twice.
TEST(ActivatedLayerRefuses, OutputsInTheMemoryOfInputs) {
  LayerRun run(Layer{}, first_samples(4));
  ForwardArguments forward = run.forward_arguments();
  forward.activation = {Activation::kRelu};
  forward.residual = run.y.view().read_only();
  EXPECT_THAT([&] { batch_norm_forward(forward, {}); },
              ::testing::ThrowsMessage<ArgumentError>(::testing::StartsWith("y: expected memory")));

  BackwardArguments backward = run.backward_arguments();
  backward.activation = {Activation::kSilu};
  for (Tensor* const tensor : {&run.x, &run.dy, &run.dx}) {
    backward.dz = tensor->view();
    EXPECT_THAT([&] { batch_norm_backward(backward, {}); },
                ::testing::ThrowsMessage<ArgumentError>(::testing::HasSubstr("memory of its own")));
  }
}

TEST(ActivatedLayerRefuses, ABackwardWithoutTheMemoryThatItNeeds) {
  LayerRun run(Layer{}, first_samples(4));
  batch_norm_forward(run.forward_arguments(), {});
  BackwardArguments arguments = run.backward_arguments();
  arguments.activation = {Activation::kHardSwish};

  EXPECT_THAT([&] { batch_norm_backward(arguments, {}); },
              ::testing::ThrowsMessage<ArgumentError>(::testing::StartsWith("dz: expected")));
}

}  // namespace
}  // namespace normscope::testing
