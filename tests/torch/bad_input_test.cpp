// SPDX-License-Identifier: Apache-2.0
//
// Ranks, tensors and devices that do not fit: every rank gets an exception that says so.
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include "normscope/core/error.h"
#include "normscope/torch/nn/batch_norm.h"
#include "tests/comm/worlds.h"
#include "tests/torch/groups.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

template <class Call>
std::string text_of_torch_error(const Call& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

nn::BatchNorm2d layer_of(const RankGroup& group, std::int64_t channels, const char* name) {
  return nn::BatchNorm2d(
      nn::BatchNormOptions(channels).scope(Scope::world()).group(group.name()).layer_name(name));
}

TEST(BadInput, RanksWithOtherChannelsAreAllToldWhoHasWhat) {
  run_ranks(2, [](const RankGroup& group) {
    const std::int64_t channels = 3 + group.rank();
    nn::BatchNorm2d layer = layer_of(group, channels, "stem");

    EXPECT_THAT(text_of_torch_error([&] { layer->forward(torch::randn({2, channels, 4, 4})); }),
                AllOf(HasSubstr("rank 0: forward of stem (3 channels, scope world)"),
                      HasSubstr("rank 1: forward of stem (4 channels, scope world)")));
    EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 0);
  });
}

TEST(BadInput, RanksWithOtherLayersAreAllToldWhoIsWhere) {
  run_ranks(2, [](const RankGroup& group) {
    nn::BatchNorm2d layer = layer_of(group, 3, group.rank() == 0 ? "stem" : "head");

    EXPECT_THAT(text_of_torch_error([&] { layer->forward(torch::randn({2, 3, 4, 4})); }),
                AllOf(HasSubstr("rank 0: forward of stem"), HasSubstr("rank 1: forward of head")));
  });
}

TEST(BadInput, RanksInDifferentGroupsDoNotWaitForEver) {
  std::vector<std::unique_ptr<Communicator>> groups[2];
  for (auto& group : groups) group = make_thread_communicators(2, {.time_limit = 100ms});
  spawn_threads(2, [&](int rank) {
    const auto self = static_cast<std::size_t>(rank);
    const RankGroup group(std::move(groups[self][self]));
    nn::BatchNorm2d layer = layer_of(group, 3, "stem");

    EXPECT_THAT(
        text_of_torch_error([&] { layer->forward(torch::randn({2, 3, 4, 4})); }),
        AllOf(HasSubstr("forward of stem"), HasSubstr("s for rank " + std::to_string(1 - rank))));
  });
}

TEST(BadInput, AScopeOfRanksThatTheGroupDoesNotHaveIsRefused) {
  run_ranks(2, [](const RankGroup& group) {
    nn::BatchNorm2d layer = layer_of(group, 3, "stem");
    layer->options.scope(Scope::ranks({{0, 7}}));

    EXPECT_THAT(text_of_torch_error([&] { layer->forward(torch::randn({2, 3, 4, 4})); }),
                HasSubstr("scope: ranks:0,7: expected ranks below 2, got 7"));
  });
}

TEST(BadInput, TensorsThatDoNotFitTheLayerAreNamed) {
  nn::BatchNorm2d layer(3);

  EXPECT_THAT(text_of_torch_error([&] { layer->forward(torch::randn({2, 4, 5, 5})); }),
              HasSubstr("x: expected 3 channels (weight has 3), got 4"));
  EXPECT_THAT(text_of_torch_error([&] { layer->forward(torch::ones({2, 3, 5, 5}, torch::kLong)); }),
              HasSubstr("x: expected float32, float64, bfloat16 or float16, got Long"));
}

TEST(BadInput, MovingToAMissingDeviceThrows) {
  nn::BatchNorm2d layer(3);
  const auto device = torch::cuda::is_available() ? torch::kHPU : torch::kCUDA;

  EXPECT_THROW(layer->to(device), c10::Error);

  EXPECT_TRUE(layer->weight.is_cpu());
  EXPECT_NO_THROW(layer->forward(torch::randn({2, 3, 4, 4})));
}

TEST(BadInput, ALayerAndItsInputOnTwoDevicesAreNamed) {
  nn::BatchNorm2d layer(3);

  EXPECT_THAT(
      text_of_torch_error([&] { layer->forward(torch::empty({2, 3, 4, 4}, torch::kMeta)); }),
      HasSubstr("weight: expected the device of x (meta), got cpu"));
}

}  // namespace
}  // namespace normscope::testing
