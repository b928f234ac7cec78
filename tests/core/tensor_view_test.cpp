// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/tensor_view.h"

#include <gtest/gtest.h>

namespace normscope {
namespace {

TEST(TensorViewTest, LayoutFollowsFromTheStrides) {
  float data[1];

  EXPECT_EQ(channels_first(data, DType::kFloat32, 2, 3, 4).layout(), Layout::kChannelsFirst);
  EXPECT_EQ(channels_last(data, DType::kFloat32, 2, 3, 4).layout(), Layout::kChannelsLast);
  EXPECT_EQ(channels_last(data, DType::kFloat32, 2, 3, 1).layout(), Layout::kChannelsLast);
  EXPECT_EQ(channels_last(data, DType::kFloat32, 2, 1, 4).layout(), Layout::kChannelsFirst);
}

TEST(TensorViewTest, KernelsNeedOneStrideOfOne) {
  float data[1];
  TensorView view = channels_first(static_cast<const void*>(data), DType::kFloat32, 2, 3, 4);
  view.position_stride = 2;

  EXPECT_FALSE(view.has_kernel_layout());

  view.positions = 1;
  EXPECT_TRUE(view.has_kernel_layout());
  view.positions = 4;
  view.channel_stride = 1;
  EXPECT_TRUE(view.has_kernel_layout());
  view.channel_stride = 4;
  view.samples = 0;
  EXPECT_TRUE(view.has_kernel_layout());
}

TEST(TensorViewTest, RangesAreViewsOfTheSameMemory) {
  double data[2 * 3 * 4];
  const MutableTensorView view = channels_first(static_cast<void*>(data), DType::kFloat64, 2, 3, 4);

  const MutableTensorView part = view.sample_range(1, 2).channel_range(1, 3);

  EXPECT_EQ(part.data, data + 12 + 4);
  EXPECT_EQ(part.samples, 1);
  EXPECT_EQ(part.channels, 2);
  EXPECT_EQ(part.sample_stride, view.sample_stride);
  EXPECT_EQ(part.read_only().data, part.data);
}

TEST(TensorViewTest, RangesOfNoDataHaveNone) {
  const TensorView nothing{};

  EXPECT_TRUE(nothing.empty());
  EXPECT_EQ(nothing.sample_range(0, 0).data, nullptr);
  EXPECT_EQ(nothing.channel_range(0, 0).data, nullptr);
}

}  // namespace
}  // namespace normscope
