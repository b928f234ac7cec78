// SPDX-License-Identifier: Apache-2.0
//
// How many blocks the kernels that sum have on an H100, which has 132 multiprocessors, and how they
// use shared memory.
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

// clang-format off: device.h defines the language that grid.h is written in
#include "tests/kernels/cuda_on_host/device.h"
#include "normscope/kernels/cuda/backend.h"
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

// The work of add_tiles_channels_last, in packs.
template <class Element>
Work work_of_sums(const Shape& shape) {
  const std::int64_t tiles =
      shape.samples * tiles_per_sample(Layout::kChannelsLast, shape.positions);
  constexpr int kPack = kPackSize<Element, Access::kPacks>;
  return work_of_tiles(shape.channels / kPack, kPack, tiles, 1, kMostColumns, kTileThreads,
                       kMultiprocessors)
      .work;
}

// The grid for bfloat16. The device runs as many blocks as there are.
Grid grid_of_sums(const Shape& shape) {
  return grid_for(work_of_sums<BFloat16>(shape), kMultiprocessors * 32);
}

// How many tiles a warp sums one after the other, if the device runs as many blocks as the
// registers leave room for.
template <class Element>
std::int64_t turns_of_sums(const Shape& shape) {
  const Work work = work_of_sums<Element>(shape);
  const std::int64_t warps = kTileBlocks<Element> * (kTileThreads / kWarp);
  const Grid grid = grid_for(work, kMultiprocessors * (warps / work.threads_y));
  return ceil_divide(work.per_column, grid.blocks_y);
}

std::int64_t blocks(const Grid& grid) { return grid.blocks_x * grid.blocks_y * grid.blocks_z; }

TEST(GridOfSums, HasBlocksOfFourWarpsForAllMultiprocessors) {
  for (const Shape& shape :
       {Shape{2, 256, 129 * 129}, Shape{32, 512, 28 * 28}, Shape{32, 64, 56 * 56}}) {
    const Grid grid = grid_of_sums(shape);
    EXPECT_EQ(grid.threads_x * grid.threads_y, 4 * kWarp);
    EXPECT_GE(blocks(grid), kMultiprocessors);
  }
}

// A fourth block on a multiprocessor saves a turn of all large ones: with three there would be 2,
// 3, 5 and 2.
TEST(GridOfSums, HasFewTurnsOfFloat32) {
  EXPECT_EQ(turns_of_sums<float>({32, 64, 56 * 56}), 1);
  EXPECT_EQ(turns_of_sums<float>({32, 512, 28 * 28}), 2);
  EXPECT_EQ(turns_of_sums<float>({32, 256, 56 * 56}), 4);
  EXPECT_EQ(turns_of_sums<float>({2, 256, 129 * 129}), 1);
  for (const Shape& shape : {Shape{2, 64, 56 * 56}, Shape{8, 64, 56 * 56}, Shape{8, 2048, 7 * 7},
                             Shape{2, 2048, 33 * 33}}) {
    EXPECT_EQ(turns_of_sums<float>(shape), 1);
  }
}

// A block has a thread for each of its 64 channels at least, and a tile of them is the work of a
// warp.
TEST(GridOfSums, HasABlockForEachTwoWarpsIfThereAreFewer) {
  for (const auto& [shape, warps] : {std::pair{Shape{8, 64, 56 * 56}, std::int64_t{8 * 25}},
                                     std::pair{Shape{8, 2048, 7 * 7}, std::int64_t{8 * 32}}}) {
    const Grid grid = grid_of_sums(shape);
    EXPECT_EQ(grid.threads_x * grid.threads_y, 2 * kWarp);
    EXPECT_EQ(2 * blocks(grid), warps);
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

// A block takes as long to finish one channel as to finish many.
TEST(GridOfGroups, HasBlocksThatRunAtOnceIfThereAreManyChannels) {
  constexpr std::int64_t kAtOnce = 2 * kMultiprocessors;
  const auto blocks_of = [](std::int64_t channels, std::int64_t tiles) {
    return blocks(grid_for(
        work_of_groups(channels, tiles, 1, 8, 256, kAtOnce, kMultiprocessors).work, kAtOnce));
  };
  EXPECT_EQ(blocks_of(2048, 32), 256);
  EXPECT_EQ(blocks_of(1024, 32), 256);
  EXPECT_EQ(blocks_of(100'000, 32), 3125);
}

TEST(GridOfGroups, HasAGroupForEachTileIfThereAreFewChannels) {
  EXPECT_EQ(work_of_groups(4, 8, 1, 8, 256, 264, 132).groups, 8);
  EXPECT_EQ(work_of_groups(4, 1000, 1, 8, 256, 264, 132).groups, 32);
}

// The warps of a block of several channels can be blocks of their own.
TEST(GridOfGroups, HasSmallBlocksIfThereAreFew) {
  const auto threads_of = [](std::int64_t channels, std::int64_t tiles) {
    return work_of_groups(channels, tiles, 1, 8, 256, 264, kMultiprocessors).work.threads_x;
  };
  EXPECT_EQ(threads_of(64, 8), 64);  // 8 groups of one channel
  EXPECT_EQ(threads_of(64, 2), 32);  // 4 groups of two: a warp
  EXPECT_EQ(threads_of(512, 8), 128);
  EXPECT_EQ(threads_of(2048, 32), 256);
}

// A device that runs 512 threads on each multiprocessor.
struct Device {
  static int multiprocessors() { return kMultiprocessors; }
  template <class Kernel>
  static std::int64_t blocks_at_once(Kernel /*kernel*/, int threads) {
    return kMultiprocessors * (512 / threads);
  }
};

// Channels and positions of the batch normalization layers of a ResNet-50 for images of 224x224.
std::vector<Shape> resnet50(std::int64_t samples) {
  std::vector<Shape> layers{{samples, 64, 112 * 112}};
  std::int64_t before = 56;
  std::int64_t channels = 64;
  for (const auto& [blocks, side] : {std::pair{3, 56}, {4, 28}, {6, 14}, {3, 7}}) {
    for (int block = 0; block < blocks; ++block) {
      const std::int64_t after = std::int64_t{side} * side;
      layers.push_back({samples, channels, block == 0 ? before * before : after});
      layers.push_back({samples, channels, after});
      layers.push_back({samples, 4 * channels, after});
      if (block == 0) layers.push_back(layers.back());  // of the shortcut
    }
    before = side;
    channels *= 2;
  }
  return layers;
}

struct Directions {
  int forward = 0;
  int backward = 0;

  bool operator==(const Directions&) const = default;
};

// In how many directions the kernel that sums can also apply. A device of the test knows no
// kernels.
template <class Element>
Directions of_one_kernel(std::int64_t samples, Layout layout) {
  Directions found;
  for (const Shape& shape : resnet50(samples)) {
    const NormBatches batches{
        .samples = samples, .positions = shape.positions, .slices = 1, .slice_size = samples};
    const auto can_apply = [&]<class AnyTerms>(const AnyTerms* /*type*/) {
      using Plans = Backend<Device>;
      constexpr int kNoKernel = 0;
      if (layout == Layout::kChannelsFirst) {
        return Plans::template plan_channels_first<Access::kPacks, AnyTerms>(
                   kNoKernel, shape.channels, batches)
            .can_apply(1);
      }
      return Plans::template plan_channels_last<Access::kPacks, AnyTerms>(kNoKernel, shape.channels,
                                                                          batches)
          .can_apply(kMostInCluster);
    };
    if (can_apply(static_cast<const MomentTerms<Element>*>(nullptr))) ++found.forward;
    if (can_apply(static_cast<const GradientTerms<Element>*>(nullptr))) ++found.backward;
  }
  return found;
}

TEST(OneKernelOfADirection, IsThatOfMostLayersOfAResNet50) {
  EXPECT_EQ(resnet50(1).size(), 53U);
  constexpr auto kFirst = Layout::kChannelsFirst;
  EXPECT_EQ(of_one_kernel<float>(2, kFirst), (Directions{53, 52}));
  EXPECT_EQ(of_one_kernel<float>(4, kFirst), (Directions{52, 52}));
  EXPECT_EQ(of_one_kernel<float>(8, kFirst), (Directions{52, 41}));
  EXPECT_EQ(of_one_kernel<float>(32, kFirst), (Directions{29, 21}));
  EXPECT_EQ(of_one_kernel<BFloat16>(4, kFirst), (Directions{53, 52}));
  EXPECT_EQ(of_one_kernel<BFloat16>(32, kFirst), (Directions{41, 36}));

  constexpr auto kLast = Layout::kChannelsLast;
  EXPECT_EQ(of_one_kernel<float>(2, kLast), (Directions{28, 28}));
  EXPECT_EQ(of_one_kernel<float>(4, kLast), (Directions{28, 28}));
  EXPECT_EQ(of_one_kernel<float>(8, kLast), (Directions{16, 16}));
  EXPECT_EQ(of_one_kernel<float>(32, kLast), (Directions{4, 4}));
  EXPECT_EQ(of_one_kernel<BFloat16>(4, kLast), (Directions{28, 28}));
  EXPECT_EQ(of_one_kernel<BFloat16>(32, kLast), (Directions{4, 4}));
}

TEST(GridOfSums, IsNoLargerThanTheDevice) {
  const Grid grid = grid_for({10, 3, 1000, 32, 8}, 600);
  EXPECT_EQ(grid.blocks_x, 10);
  EXPECT_EQ(grid.blocks_y, 20);
  EXPECT_EQ(grid.blocks_z, 3);
}

}  // namespace
}  // namespace normscope::cuda
