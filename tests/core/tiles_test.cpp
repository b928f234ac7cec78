// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/tiles.h"

#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

namespace normscope {
namespace {

class TilesTest : public ::testing::TestWithParam<Layout> {};

TEST_P(TilesTest, LanesShareAFullTileInChainsOfTheStatedLength) {
  const TileShape shape = tile_shape(GetParam());
  std::vector<std::int64_t> chains(static_cast<std::size_t>(shape.lanes));

  for (std::int64_t p = 0; p < shape.positions; ++p) {
    chains.at(static_cast<std::size_t>(lane_of(GetParam(), p))) += 1;
  }

  for (const std::int64_t chain : chains) EXPECT_EQ(chain, shape.chain);
  EXPECT_LE(shape.lanes, kMaxLanes);
}

TEST_P(TilesTest, TilesCoverThePositionsOfASample) {
  const std::int64_t size = tile_shape(GetParam()).positions;

  EXPECT_EQ(tiles_per_sample(GetParam(), 0), 0);
  EXPECT_EQ(tiles_per_sample(GetParam(), 1), 1);
  EXPECT_EQ(tiles_per_sample(GetParam(), size), 1);
  EXPECT_EQ(tiles_per_sample(GetParam(), size + 1), 2);
}

TEST_P(TilesTest, PivotSamplesSpreadOverTheTileAndStayInside) {
  const TileShape shape = tile_shape(GetParam());
  for (std::int64_t n = 1; n <= shape.positions; ++n) {
    const PivotSamples samples = pivot_samples(GetParam(), n);
    const std::int64_t last = (samples.count - 1) * samples.stride;

    ASSERT_GE(samples.count, 1);
    ASSERT_LE(samples.count, shape.pivot_samples);
    ASSERT_LT(last, n);
    // At most half of the tile comes after the last sample.
    ASSERT_LE(n - 1 - last, n / 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, TilesTest,
                         ::testing::Values(Layout::kChannelsFirst, Layout::kChannelsLast),
                         [](const auto& layout) {
                           return layout.param == Layout::kChannelsFirst ? "ChannelsFirst"
                                                                         : "ChannelsLast";
                         });

}  // namespace
}  // namespace normscope
