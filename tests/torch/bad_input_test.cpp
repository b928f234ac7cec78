// SPDX-License-Identifier: Apache-2.0
//
// Ranks, tensors and devices that do not fit: every rank gets an exception that says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include "normscope/torch/nn/batch_norm.h"
#include "tests/support/text_of.h"
#include "tests/torch/groups.h"

namespace normscope::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(BadInput, RanksWithOtherChannelsAreAllToldWhoHasWhat) {
  run_ranks(2, [](const RankGroup& group) {
    const std::int64_t channels = 3 + group.rank();
    nn::BatchNorm2d layer(nn::BatchNormOptions(channels).group(group.name()).layer_name("stem"));

    EXPECT_THAT(text_of<c10::Error>([&] { layer->forward(torch::randn({2, channels, 4, 4})); }),
                AllOf(HasSubstr("rank 0: forward of stem (3 channels, scope world)"),
                      HasSubstr("rank 1: forward of stem (4 channels, scope world)")));
    EXPECT_EQ(layer->num_batches_tracked.item<std::int64_t>(), 0);
  });
}

TEST(BadInput, TensorsThatDoNotFitTheLayerAreNamed) {
  nn::BatchNorm2d layer(3);

  EXPECT_THAT(text_of<c10::Error>([&] { layer->forward(torch::randn({2, 4, 5, 5})); }),
              HasSubstr("x: expected 3 channels (weight has 3), got 4"));
  EXPECT_THAT(text_of<c10::Error>([&] { layer->forward(torch::ones({2, 3, 5, 5}, torch::kLong)); }),
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
      text_of<c10::Error>([&] { layer->forward(torch::empty({2, 3, 4, 4}, torch::kMeta)); }),
      HasSubstr("weight: expected the device of x (meta), got cpu"));
}

}  // namespace
}  // namespace normscope::testing
