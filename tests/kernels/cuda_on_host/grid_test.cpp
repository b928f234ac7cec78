// SPDX-License-Identifier: Apache-2.0
//
// How many blocks the kernels that sum have on an H100, which has 132 multiprocessors, and how they
// use shared memory.
#include <cstdint>
#include <set>
#include <utility>

#include <gtest/gtest.h>

// clang-format off: device.h defines the language that grid.h is written in
#include "tests/kernels/cuda_on_host/device.h"
#include "normscope/kernels/cuda/grid.h"
#include "normscope/kernels/cuda/sum_channels_last.cuh"
// clang-format on

namespace normscope::cuda {
namespace {

constexpr std::int64_t kMultiprocessors = 132;

struct Shape {
  std::int64_t samples;
  std::int64_t channels;
  std::int64_t positions;
};

// The grid of add_tiles_channels_last for bfloat16. The device runs as many blocks as there are.
Grid grid_of_sums(const Shape& shape) {
  const std::int64_t tiles =
      shape.samples * tiles_per_sample(Layout::kChannelsLast, shape.positions);
  const std::int64_t packs = shape.channels / kPackSize<BFloat16, Access::kPacks>;
  return grid_for(work_of_tiles(packs, tiles, 1, kMostColumns, kTileThreads, kMultiprocessors).work,
                  kMultiprocessors * 32);
}

std::int64_t blocks(const Grid& grid) { return grid.blocks_x * grid.blocks_y * grid.blocks_z; }

TEST(GridOfSums, HasBlocksForAllMultiprocessorsSeveralTimesOver) {
  EXPECT_GE(blocks(grid_of_sums({2, 256, 129 * 129})), 4 * kMultiprocessors);
  EXPECT_GE(blocks(grid_of_sums({32, 512, 28 * 28})), 4 * kMultiprocessors);
}

// A warp is the least that a block can have, and a tile of 64 channels is the work of one.
TEST(GridOfSums, HasABlockForEachWarpIfThereAreFewerThanThat) {
  for (const auto& [shape, warps] : {std::pair{Shape{8, 64, 56 * 56}, std::int64_t{8 * 25}},
                                     std::pair{Shape{8, 2048, 7 * 7}, std::int64_t{8 * 32}}}) {
    const Grid grid = grid_of_sums(shape);
    EXPECT_EQ(grid.threads_x * grid.threads_y, kWarp);
    EXPECT_EQ(blocks(grid), warps);
    EXPECT_GT(blocks(grid), kMultiprocessors);
  }
}

TEST(GridOfSums, HasWholeWarpsForNarrowTensors) {
  for (const std::int64_t packs : {1, 2, 3, 7, 8, 9, 100}) {
    const int columns = side_by_side(packs, kMostColumns);
    EXPECT_GE(columns, packs < kMostColumns ? packs : kMostColumns);
    EXPECT_EQ(columns * kTileLanes * (kMostColumns / columns), kWarp);
  }
}

// Shared memory has 32 banks of 4 bytes. Half a warp reads or writes 8 bytes per thread at a time.
template <int kWidth>
void expect_no_bank_conflicts() {
  using Exchange = LimbExchange<kWidth, kTileThreads>;
  for (int j = 0; j < kWidth; ++j) {
    for (int half = 0; half < kWarp; half += kWarp / 2) {
      std::set<int> banks;
      for (int thread = half; thread < half + kWarp / 2; ++thread) {
        const int word = 2 * Exchange::place(thread, j);
        banks.insert({word % 32, (word + 1) % 32});
      }
      EXPECT_EQ(banks.size(), 32U);
    }
  }
}

TEST(LimbExchange, HasNoBankConflicts) {
  expect_no_bank_conflicts<1>();
  expect_no_bank_conflicts<2>();
}

TEST(GridOfSums, IsNoLargerThanTheDevice) {
  const Grid grid = grid_for({10, 3, 1000, 32, 8}, 600);
  EXPECT_EQ(grid.blocks_x, 10);
  EXPECT_EQ(grid.blocks_y, 20);
  EXPECT_EQ(grid.blocks_z, 3);
}

}  // namespace
}  // namespace normscope::cuda
