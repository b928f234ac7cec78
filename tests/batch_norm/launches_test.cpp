// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <gtest/gtest.h>

#include "tests/batch_norm/device_rank.h"
#include "tests/comm/worlds.h"
#include "tests/kernels/cuda_on_host/backend.h"

namespace normscope::testing {
namespace {

// Sum, finalize, apply; with other ranks a message is sealed too, and backward finalizes twice. A
// cumulative average computes its momentum.
TEST(LaunchesOnADevice, AreThreeADirectionAloneAndFourAndFiveWithAnExchange) {
  LayerRun run(Layer{}, first_samples(2));
  const auto launches_of = [](const auto& call) {
    const int before = cuda_on_host::launches();
    call();
    return cuda_on_host::launches() - before;
  };
  RunningAverage average = RunningAverage::kExponential;
  const auto forward = [&](DeviceRank& device) {
    ForwardArguments arguments = run.forward_arguments();
    arguments.running_average = average;
    return launches_of([&] { batch_norm_forward(arguments, device.context()); });
  };
  const auto backward = [&](DeviceRank& device) {
    return launches_of([&] { batch_norm_backward(run.backward_arguments(), device.context()); });
  };
  DeviceRank alone(nullptr);

  EXPECT_EQ(forward(alone), 3);
  EXPECT_EQ(backward(alone), 3);
  average = RunningAverage::kCumulative;
  EXPECT_EQ(forward(alone), 4);
  average = RunningAverage::kExponential;

  run_alone(1, {}, [&](Communicator& communicator) {
    Exchange exchange(std::make_unique<HostedCommunicator>(communicator), WhenAlone::kExchange);
    DeviceRank device(&exchange);

    EXPECT_EQ(forward(device), 4);
    EXPECT_EQ(backward(device), 5);
  });
}

}  // namespace
}  // namespace normscope::testing
