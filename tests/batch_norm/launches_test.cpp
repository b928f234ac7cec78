// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <gtest/gtest.h>

#include "tests/batch_norm/device_rank.h"
#include "tests/comm/on_device/device_communicator.h"
#include "tests/comm/worlds.h"
#include "tests/kernels/cuda_on_host/backend.h"

namespace normscope::testing {
namespace {

// All kernels of a direction, and those that have started while the one before could still run.
struct Launches {
  int all;
  int early;

  bool operator==(const Launches&) const = default;
};

Launches launches() { return {cuda_on_host::launches(), cuda_on_host::early_starts()}; }

// A direction alone sums and applies: in one kernel if a block or a cluster has all elements of its
// channels, and all rows start at a pack. With other ranks, another launch uses the totals in
// between, unless the kernel that sums has exchanged them. That one waits for other ranks, and lets
// no other kernel take room meanwhile. Slices and cumulative averages cost no launch.
TEST(LaunchesOnADevice, AreOneOrTwoPerDirectionAndThreeWithAMessage) {
  const auto launches_of = [](const auto& call) {
    const Launches before = launches();
    call();
    return Launches{launches().all - before.all, launches().early - before.early};
  };
  const auto expect_launches = [&](DeviceRank& device, const Layer& layer, std::int64_t slices,
                                   Launches expected) {
    for (const RunningAverage average :
         {RunningAverage::kExponential, RunningAverage::kCumulative}) {
      LayerRun run(layer, first_samples(6), slices);
      ForwardArguments arguments = run.forward_arguments();
      arguments.running_average = average;

      EXPECT_EQ(launches_of([&] { batch_norm_forward(arguments, device.context()); }), expected);
      EXPECT_EQ(
          launches_of([&] { batch_norm_backward(run.backward_arguments(), device.context()); }),
          expected);
    }
  };
  const Layer first{.layout = Layout::kChannelsFirst, .channels = 8};
  const Layer last{.layout = Layout::kChannelsLast, .channels = 8};
  const Layer unaligned{.layout = Layout::kChannelsLast, .channels = 7};
  DeviceRank alone(nullptr, 8, 3);

  for (const Layer& layer : {first, last}) {
    expect_launches(alone, layer, 1, {1, 0});
    expect_launches(alone, layer, 3, {2, 1});
  }
  DeviceRank alone_unaligned(nullptr, 7);
  expect_launches(alone_unaligned, unaligned, 1, {2, 1});

  run_alone(1, {}, [&](Communicator& communicator) {
    Exchange exchange(std::make_unique<HostedCommunicator>(communicator), WhenAlone::kExchange);
    DeviceRank device(&exchange, 8);

    expect_launches(device, first, 1, {3, 1});
    expect_launches(device, last, 1, {3, 1});
  });

  run_as_threads_on_device(1, {}, [&](Communicator& communicator) {
    Exchange exchange(std::make_unique<BorrowedCommunicator>(communicator), WhenAlone::kExchange);
    DeviceRank device(&exchange, 8);

    expect_launches(device, first, 1, {1, 0});
    expect_launches(device, last, 1, {1, 0});
    DeviceRank device_unaligned(&exchange, 7);
    expect_launches(device_unaligned, unaligned, 1, {2, 0});
  });
}

}  // namespace
}  // namespace normscope::testing
