// SPDX-License-Identifier: Apache-2.0
//
// Tensors and devices that do not fit: the exception says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include "normscope/torch/nn/batch_norm.h"
#include "tests/support/text_of.h"

namespace normscope::testing {
namespace {

using ::testing::HasSubstr;

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
