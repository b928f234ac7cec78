// SPDX-License-Identifier: Apache-2.0
//
// Ranks that share a device: threads with streams of their own, whose messages are added on the
// device by kernels that wait for each other.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ranges>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/device_rank.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/comm/on_device/device_communicator.h"
#include "tests/kernels/kernels_under_test.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

// Messages of different sizes follow each other.
std::vector<Layer> layers_of_a_network() {
  return {{.channels = 5},
          {.dtype = DType::kBFloat16, .layout = Layout::kChannelsLast, .channels = 64},
          {.channels = 1, .positions = 7},
          {.layout = Layout::kChannelsLast, .channels = 33, .positions = 1}};
}

// A network of one rank: the layers above, each with inputs of its own.
class Network {
 public:
  explicit Network(const std::vector<std::int64_t>& samples) {
    for (const Layer& layer : layers_of_a_network()) layers_.emplace_back(layer, samples);
  }

  void step(const CallContext& context) {
    for (LayerRun& layer : layers_) {
      batch_norm_forward(layer.forward_arguments(), context);
    }
    for (LayerRun& layer : std::views::reverse(layers_)) {
      batch_norm_backward(layer.backward_arguments(), context);
    }
  }

  // Compares the results with those of one rank that has all samples.
  void expect_equal_bits_of(const Network& whole) const {
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      expect_equal_bits(layers_[i], whole.layers_[i]);
    }
  }

 private:
  std::vector<LayerRun> layers_;
};

class ASharedDevice : public ::testing::Test {
 protected:
  using Body = std::function<void(DeviceRank& device, Exchange& exchange)>;

  static void run(int ranks, const ExchangeOptions& options, const Body& body) {
    run_as_threads_on_device(ranks, options, [&](Communicator& communicator) {
      Exchange exchange(std::make_unique<BorrowedCommunicator>(communicator), WhenAlone::kExchange);
      DeviceRank device(&exchange, 64);
      body(device, exchange);
    });
  }

  // What one rank with all samples has after some steps, computed on the host.
  static Network joined(int steps) {
    Network whole(first_samples(kFewSamples));
    for (int i = 0; i < steps; ++i) whole.step({});
    return whole;
  }

  // Ragged shares of the samples; rank 0 of several has none.
  static Network own_part(const Exchange& exchange) {
    const Communicator& ranks = exchange.communicator();
    return Network(
        uneven_and_permuted(kFewSamples, ranks.size())[static_cast<std::size_t>(ranks.rank())]);
  }
};

class SharedDevice : public ASharedDevice, public ::testing::WithParamInterface<int> {
 protected:
  static void run(const Body& body) { ASharedDevice::run(GetParam(), {}, body); }
};

// A race needs time to show: each rank steps as fast as its peers let it.
TEST_P(SharedDevice, HundredsOfExchangesKeepTheBitsOfTheJoinedBatch) {
  constexpr int kSteps = 50;
  const Network whole = joined(kSteps);

  run([&](DeviceRank& device, const Exchange& exchange) {
    Network network = own_part(exchange);

    for (int i = 0; i < kSteps; ++i) network.step(device.context());

    network.expect_equal_bits_of(whole);
  });
}

// Rank 0 queues all of its graphs, whether or not its peers have come.
TEST_P(SharedDevice, GraphsMeetEagerRanksWithTheBitsOfTheJoinedBatch) {
  constexpr int kSteps = 10;
  const Network whole = joined(kSteps);

  run([&](DeviceRank& device, const Exchange& exchange) {
    Network network = own_part(exchange);
    const auto step = [&] { network.step(device.context()); };
    const bool uses_graph = exchange.communicator().rank() % 2 == 0;
    const std::function<void()> replay = uses_graph ? device.stream().capture(step) : step;
    (void)exchanged_sum_of_ranks(exchange.communicator());  // captures may wait for the device

    for (int i = 0; i < kSteps; ++i) replay();

    device.stream().wait();
    network.expect_equal_bits_of(whole);
    (void)exchanged_sum_of_ranks(exchange.communicator());  // no kernel waits for another now
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedDevice, ::testing::Values(1, 2, 3, 4),
                         ::testing::PrintToStringParamName());

struct Call {
  std::string name;
  std::string label = "block.bn";
  Layer layer = {};
  Direction direction = Direction::kForward;

  // Makes the call, whose results must be NaN.
  void expect_nan_on(DeviceRank& device) const {
    LayerRun run(layer, first_samples(2));
    CallContext context = device.context();
    context.layer = label;
    if (direction == Direction::kForward) {
      batch_norm_forward(run.forward_arguments(), context);
      expect_nan(run);
    } else {
      batch_norm_backward(run.backward_arguments(), context);
      expect_nan(run.dx);
    }
  }
};

class FaultsOnASharedDevice : public SharedDevice {};

TEST_P(FaultsOnASharedDevice, DifferentCallsGiveNaNAndTheNextCallNamesThem) {
  const Call usual{.name = "forward of block.bn (5 channels, scope world)"};
  for (const Call& different :
       {Call{.name = "forward of head.bn (5 channels, scope world)", .label = "head.bn"},
        Call{.name = "forward of block.bn (64 channels, scope world)", .layer = {.channels = 64}},
        Call{.name = usual.name, .layer = {.dtype = DType::kFloat64}},
        Call{.name = "backward of block.bn (5 channels, scope world)",
             .direction = Direction::kBackward}}) {
    run([&](DeviceRank& device, const Exchange& exchange) {
      const Call& own = is_last(exchange) ? different : usual;

      own.expect_nan_on(device);

      // Until then, no host has said anything.
      (void)exchanged_sum_of_ranks(exchange.communicator());
      EXPECT_THAT(
          error_of_next_call<MismatchError>(device),
          AllOf(StartsWith("the ranks of a scope made different calls: this rank's " + own.name),
                HasSubstr("NORMSCOPE_CHECK=1")));
    });
  }
}

// The failure may come before the peers' exchange or during it. Their devices only find that the
// totals are not those of equal calls.
TEST_P(FaultsOnASharedDevice, ARankThatFailsGivesNaNOrAnError) {
  const DeviceKernels broken = kernels_without_memory();
  run([&](DeviceRank& device, const Exchange& exchange) {
    if (is_last(exchange)) {
      device.device().kernels = &broken;
      (void)error_of_next_call<DeviceError>(device);
      return;
    }
    LayerRun run(Layer{}, first_samples(2));
    try {
      batch_norm_forward(run.forward_arguments(), device.context());
      expect_nan(run);
    } catch (const CommunicationError&) {  // NOLINT(bugprone-empty-catch)
    }
    EXPECT_THAT(error_of_next_call<CommunicationError>(device),
                HasSubstr(" failed: cuda: out of memory"));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FaultsOnASharedDevice, ::testing::Values(2, 3, 4),
                         ::testing::PrintToStringParamName());

// With two ranks: of several that come, one may be late.
TEST_F(ASharedDevice, GivesNaNIfARankDoesNotComeAndTheNextCallThrows) {
  PipeGate until_rank_0_ends;
  run(2, {.time_limit = 100ms}, [&](DeviceRank& device, const Exchange& exchange) {
    if (is_last(exchange)) {
      until_rank_0_ends.wait();
      return;
    }
    LayerRun run(Layer{}, first_samples(2));
    batch_norm_forward(run.forward_arguments(), device.context());
    expect_nan(run);
    EXPECT_THAT(error_of_next_call<CommunicationError>(device),
                HasSubstr("device: waited 0.1 s for rank 1 of 2"));
    until_rank_0_ends.open_for(1);
  });
}

}  // namespace
}  // namespace normscope::testing
