// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <tuple>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/activated_run.h"
#include "tests/comm/worlds.h"
#include "tests/support/execution.h"

namespace normscope::testing {
namespace {

using Combination = std::tuple<DType, Layout>;

class ActivatedLayer : public ::testing::TestWithParam<Combination> {
 protected:
  static Layer layer(std::int64_t positions) {
    const auto& [dtype, layout] = GetParam();
    return {.dtype = dtype, .layout = layout, .channels = 21, .positions = positions};
  }
};

TEST_P(ActivatedLayer, IsASequenceOfSingleOperations) {
  const Execution two_threads = on_threads(2);
  CallContext context;
  context.execution = &two_threads;
  for (const Activated& activated : activated_layers(false)) {
    for (const std::int64_t slices : {1, 3}) {
      for (const std::int64_t positions : {1, 70}) {
        SCOPED_TRACE(name_of_activation(activated.activation));
        // As three slices, of 3, 3 and 2 samples.
        ASSERT_NO_FATAL_FAILURE(expect_single_operations(layer(positions), activated,
                                                         first_samples(8), slices, context));
      }
    }
  }
}

TEST_P(ActivatedLayer, SharesItsStatistics) {
  for (const int ranks : {2, 3}) {
    const Assignment assignment = uneven_and_permuted(11, ranks);
    run_as_threads(ranks, {}, [&](Communicator& communicator) {
      Exchange exchange = exchange_over(communicator);
      for (const Activated& activated : activated_layers(false)) {
        ASSERT_NO_FATAL_FAILURE(expect_single_operations(
            layer(70), activated, assignment[static_cast<std::size_t>(communicator.rank())], 1,
            context_of(&exchange)));
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(, ActivatedLayer,
                         ::testing::Combine(::testing::ValuesIn(kAllDTypes),
                                            ::testing::ValuesIn(kAllLayouts)),
                         [](const auto& combination) {
                           return std::string(name_of(std::get<0>(combination.param))) + "_" +
                                  name_of(std::get<1>(combination.param));
                         });

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
