// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward with kernels that work in a device's memory: the bits of the host, and
// errors that nobody waits for. Uses the CUDA kernels' source on the host, or a GPU.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "normscope/core/error.h"
#include "tests/batch_norm/activated_run.h"
#include "tests/batch_norm/device_rank.h"
#include "tests/batch_norm/layer_run.h"
#include "tests/batch_norm/parts_run.h"
#include "tests/comm/on_device/device_communicator.h"
#include "tests/comm/worlds.h"
#include "tests/kernels/kernels_under_test.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<Layer> layers() {
  return with_every_type(
      {{.positions = 130}, {.positions = 1, .parameters = Parameters::kLikeInput}});
}

class OnADevice : public ::testing::TestWithParam<World> {
 protected:
  template <class Body>
  static void run(const Body& body) {
    GetParam().run(GetParam().ranks, {}, [&](Communicator& communicator) {
      Exchange exchange(std::make_unique<BorrowedCommunicator>(communicator), WhenAlone::kExchange);
      body(exchange);
    });
  }

  // The error of the next call. The group has failed then.
  template <class Expected>
  static std::string error_of_next_call(DeviceRank& device) {
    const std::string text = testing::error_of_next_call<Expected>(device);
    LayerRun next(Layer{}, first_samples(2));
    EXPECT_THROW(next.step(device.context()), CommunicationError);
    return text;
  }
};

TEST_P(OnADevice, TheBitsAreThoseOfTheHost) {
  run([](Exchange& exchange) {
    DeviceRank device(&exchange);
    const auto rank = static_cast<std::size_t>(exchange.communicator().rank());
    const int ranks = exchange.communicator().size();
    for (const Layer& layer : layers()) {
      for (const Assignment& assignment :
           {in_order(kFewSamples, ranks), uneven_and_permuted(kFewSamples, ranks)}) {
        LayerRun expected(layer, assignment[rank]);
        expected.step(context_of(&exchange));
        LayerRun run(layer, assignment[rank]);

        run.step(device.context());

        ASSERT_NO_FATAL_FAILURE(expect_same(run, expected));
      }
    }
  });
}

// In two types and layouts: kernels are tested in all of them.
TEST_P(OnADevice, WithAnActivationItIsASequenceOfSingleOperations) {
  constexpr Layer kFloat32{.positions = 130};
  constexpr Layer kBFloat16{.dtype = DType::kBFloat16,
                            .layout = Layout::kChannelsLast,
                            .positions = 130,
                            .parameters = Parameters::kLikeInput,
                            .buffers = DType::kBFloat16};
  run([&](Exchange& exchange) {
    DeviceRank device(&exchange);
    const auto rank = static_cast<std::size_t>(exchange.communicator().rank());
    const Assignment assignment = in_order(kFewSamples, exchange.communicator().size());
    for (const Layer& layer : {kFloat32, kBFloat16}) {
      for (const Activated& activated : activated_layers()) {
        ASSERT_NO_FATAL_FAILURE(
            expect_single_operations(layer, activated, assignment[rank], device.context()));
      }
    }
  });
}

TEST_P(OnADevice, NoValueOnAnyRankUpdatesNothing) {
  run([](Exchange& exchange) {
    for (const std::int64_t channels : {5, 0}) {
      DeviceRank device(&exchange, channels);
      LayerRun expected({.channels = channels}, {});
      expected.step(context_of(&exchange));
      LayerRun run({.channels = channels}, {});

      run.step(device.context());

      expect_same(run, expected);
      EXPECT_EQ(run.running_mean.values(),
                std::vector<double>(static_cast<std::size_t>(channels), 0.5));
    }
  });
}

TEST_P(OnADevice, OneValueOverAllRanksGivesNaNAndTheNextCallThrows) {
  run([](Exchange& exchange) {
    DeviceRank device(&exchange);
    LayerRun run({.positions = 1}, first_samples(is_last(exchange) ? 1 : 0));

    batch_norm_forward(run.forward_arguments(), device.context());

    expect_nan(run);
    EXPECT_THAT(error_of_next_call<OneValueError>(device),
                AllOf(StartsWith("x: expected more than 1 value per channel"),
                      HasSubstr("in an earlier call, forward of block.bn (5 channels, scope "
                                "world), whose results are NaN")));
  });
}

TEST(PartsOnADevice, RefuseWhatTheHostRefuses) {
  DeviceRank device(nullptr);
  LayerRun run(Layer{}, first_samples(2));

  expect_finalize_refusals(run, device.context());
}

TEST(PartsOnADevice, HaveTheBitsOfOneBatch) {
  DeviceRank device(nullptr);
  for (const Layer& layer : layers()) {
    ASSERT_NO_FATAL_FAILURE(expect_parts_are_one_batch(layer, device.context()));
    ASSERT_NO_FATAL_FAILURE(expect_accumulated_is_one_update(layer, device.context()));
  }
}

TEST(RanksOnADevice, CompareANewLayerFirstIfTheTransportIsFragile) {
  run_as_threads_on_device(3, {}, [](Communicator& communicator) {
    Exchange exchange(std::make_unique<FragileCommunicator>(communicator));
    const Layer layer{.channels = is_last(exchange) ? 6 : 5};
    DeviceRank device(&exchange, layer.channels);
    LayerRun run(layer, first_samples(2));

    const std::string text = text_of<MismatchError>(
        [&] { batch_norm_forward(run.forward_arguments(), device.context()); });

    EXPECT_THAT(text, AllOf(HasSubstr("rank 0: forward of block.bn (5 channels, scope world)"),
                            HasSubstr("forward of block.bn (6 channels, scope world)")));
  });
}

INSTANTIATE_TEST_SUITE_P(Alone, OnADevice, worlds({1}, hosted(run_alone)), ranks_of);
INSTANTIATE_TEST_SUITE_P(Threads, OnADevice, worlds({2, 3}, hosted(run_as_threads)), ranks_of);
INSTANTIATE_TEST_SUITE_P(OneDevice, OnADevice, worlds({2, 4}, run_as_threads_on_device), ranks_of);

void expect_bits_of_the_host(DeviceRank& device, const Layer& layer, std::int64_t samples,
                             std::int64_t slices, SliceStats slice_stats = SliceStats::kPooled,
                             RunningAverage average = RunningAverage::kExponential) {
  LayerRun expected(layer, first_samples(samples), slices);
  expected.step({}, slice_stats, average);
  LayerRun run(layer, first_samples(samples), slices);

  run.step(device.context(), slice_stats, average);

  expect_same(run, expected);
  EXPECT_THAT(device.scratch(), Each(0.0));
}

TEST(AloneOnADevice, TheBitsAreThoseOfTheHostForEveryRuleOfSlices) {
  // 7 samples in slices of 3, 3 and 1; of 2, 2, 2 and 1.
  for (const std::int64_t slices : {1, 3, 4}) {
    for (const Layout layout : kAllLayouts) {
      for (const SliceStats slice_stats :
           {SliceStats::kPooled, SliceStats::kFirst, SliceStats::kSequential}) {
        for (const RunningAverage average :
             {RunningAverage::kExponential, RunningAverage::kCumulative}) {
          DeviceRank device(nullptr, 5, slices);
          ASSERT_NO_FATAL_FAILURE(expect_bits_of_the_host(device, {.layout = layout}, kFewSamples,
                                                          slices, slice_stats, average));
        }
      }
    }
  }
}

TEST(AloneOnADevice, SlicesOfSingleElementsHaveTheBitsOfTheHost) {
  for (const std::int64_t channels : {5, 64}) {
    DeviceRank device(nullptr, channels, 10);
    expect_bits_of_the_host(
        device, {.layout = Layout::kChannelsLast, .channels = channels, .positions = 1}, 40, 10);
  }
}

TEST(AloneOnADevice, AScratchMemoryServesLayersOfAnySize) {
  DeviceRank device(nullptr, 64, 4);
  for (const std::int64_t channels : {64, 5, 33}) {
    for (const std::int64_t slices : {4, 1}) {
      expect_bits_of_the_host(device, {.channels = channels}, 8, slices);
    }
  }
}

TEST(AloneOnADevice, ARepeatedApplyGivesTheBitsOfForward) {
  for (const std::int64_t slices : {1, 3}) {
    DeviceRank device(nullptr, 5, slices);
    LayerRun run(Layer{}, first_samples(kFewSamples), slices);
    batch_norm_forward(run.forward_arguments(), device.context());
    const ForwardArguments forward = run.forward_arguments();
    Tensor y = run.x;

    batch_norm_with_statistics({.x = forward.x,
                                .y = y.view(),
                                .weight = forward.weight,
                                .bias = forward.bias,
                                .statistics = run.statistics.data(),
                                .slices = slices},
                               device.context());

    y.for_each([&](std::int64_t n, std::int64_t c, std::int64_t p) {
      ASSERT_PRED2(same_bits, y.at(n, c, p), run.y.at(n, c, p));
    });
  }
}

// If a device refuses a launch, its error is thrown, and peers need not wait.
TEST(AloneOnADevice, ADevicesErrorIsThrownAndFailsTheGroup) {
  run_alone(1, {}, [](Communicator& communicator) {
    Exchange exchange(std::make_unique<HostedCommunicator>(communicator), WhenAlone::kExchange);
    DeviceRank device(&exchange);
    const DeviceKernels broken = kernels_without_memory();
    device.device().kernels = &broken;
    LayerRun run(Layer{}, first_samples(2));

    EXPECT_EQ(text_of<DeviceError>(
                  [&] { batch_norm_forward(run.forward_arguments(), device.context()); }),
              "cuda: out of memory");
    device.device().kernels = &device_kernels_under_test();
    EXPECT_THROW(run.step(device.context()), CommunicationError);
  });
}

TEST(AloneOnADevice, OneValueIsRefusedAtOnce) {
  DeviceRank device(nullptr);
  LayerRun run({.positions = 1}, first_samples(1));

  EXPECT_THROW(batch_norm_forward(run.forward_arguments(), device.context()), OneValueError);
}

TEST(AloneOnADevice, WhatTheDeviceNeedsIsNamed) {
  run_alone(1, {}, [](Communicator& communicator) {
    Exchange exchange(std::make_unique<HostedCommunicator>(communicator), WhenAlone::kExchange);
    DeviceRank device(&exchange);
    LayerRun run(Layer{}, first_samples(2));
    const auto refusal = [&](const CallContext& context) {
      return text_of<ArgumentError>([&] { batch_norm_forward(run.forward_arguments(), context); });
    };
    const CallContext context = device.context();
    const DeviceContext complete = device.device();

    device.device().report = nullptr;
    EXPECT_EQ(refusal(context),
              "report: expected memory of the host that the device can write, got none");
    device.device() = complete;
    device.device().scratch = nullptr;
    EXPECT_EQ(refusal(context), "scratch: expected zeros of the device, got none");
    device.device() = complete;
    device.device().workspace = nullptr;
    EXPECT_EQ(refusal(context), "workspace: expected memory of the device, got none");
    device.device() = complete;
    device.device().kernels = nullptr;
    EXPECT_EQ(refusal(context), "device: expected kernels, got none");
  });
}

}  // namespace
}  // namespace normscope::testing
