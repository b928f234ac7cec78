// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "normscope/core/tensor_view.h"
#include "normscope/kernels/cuda/packs.cuh"

namespace normscope::cuda {

// kAfter: the kernel starts when all previous ones on the stream have ended.
// kEarly: it may start while the previous one still runs, which hides the time of the launch.
// Before it calls wait_for_earlier_kernel(), it may read what was there before the last kernel of
// kAfter was launched, and must not write.
enum class Order { kAfter, kEarly };

// The kernels' grids. Device launches them: a GPU, or its stand-in on the host for tests.
//
//   struct Device {
//     static int multiprocessors();
//     // How many blocks of so many threads of the kernel run at the same time.
//     template <class Kernel>
//     static std::int64_t blocks_at_once(Kernel kernel, int threads);
//     // The most blocks of a cluster of this kernel; 1 if there are no clusters.
//     template <class Kernel>
//     static std::int64_t most_in_cluster(Kernel kernel);
//     static std::int64_t l2_bytes();
//     static bool is_capturing(Stream stream);
//     static double* new_zeros(Stream stream, std::int64_t size);
//     // Those of PeerFunctions.
//     static double* allocate_for_peers(std::int64_t size, PeerHandle& handle);
//     static double* open_of_peer(const PeerHandle& handle);
//     static std::uint64_t* allocate_word();
//     static void order(Stream earlier, Stream later);
//     template <class Kernel, class... Arguments>
//     static void launch(Stream stream, const Grid& grid, Order order, Kernel kernel,
//                        Arguments... arguments);
//   };
struct Grid {
  std::int64_t blocks_x;
  std::int64_t blocks_y;
  std::int64_t blocks_z;
  int threads_x;
  int threads_y;
  std::int64_t cluster_y = 1;  // blocks that run at the same time, of a column
};

[[nodiscard]] constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Blocks along the second and the third dimension of a grid.
inline constexpr std::int64_t kMostInYOrZ = 65535;

// What blocks can share: columns and slices, which are blocks of their own, and the work of one
// column of one slice, which can be split into `per_column` parts.
struct Work {
  std::int64_t columns;
  std::int64_t slices;
  std::int64_t per_column;
  int threads_x;
  int threads_y;
};

// Splits columns as long as there is work, and all blocks run at the same time: a second turn of a
// few blocks would take as long as the first.
[[nodiscard]] constexpr Grid grid_for(const Work& work, std::int64_t blocks_at_once) {
  const std::int64_t blocks_x = std::max<std::int64_t>(work.columns, 1);
  const std::int64_t blocks_z = std::clamp<std::int64_t>(work.slices, 1, kMostInYOrZ);
  const std::int64_t splits = std::min(blocks_at_once / (blocks_x * blocks_z), work.per_column);
  return {blocks_x, std::clamp<std::int64_t>(splits, 1, kMostInYOrZ), blocks_z, work.threads_x,
          work.threads_y};
}

// Work in parts of one warp each. Blocks have up to most_threads threads if they still reach all
// multiprocessors: the warps of a block add their sums to each other, blocks to those in memory.
// They have least_threads at least, to finish as many channels together.
[[nodiscard]] constexpr Work work_of_warps(std::int64_t columns, std::int64_t slices,
                                           std::int64_t warps_per_column, int least_threads,
                                           int most_threads, std::int64_t multiprocessors) {
  int warps = most_threads / kWarp;
  const auto blocks = [&] { return columns * slices * ceil_divide(warps_per_column, warps); };
  while (warps * kWarp >= 2 * std::max(least_threads, kWarp) && blocks() < multiprocessors) {
    warps /= 2;
  }
  return {columns, slices, ceil_divide(warps_per_column, warps), kWarp, warps};
}

// How many threads are side by side: as many as there are packs of channels, up to `most`.
[[nodiscard]] constexpr int side_by_side(std::int64_t packs, int most) {
  int threads = 1;
  while (threads < most && threads < packs) threads *= 2;
  return threads;
}

// The work of warps that sum `tiles` tiles of each channel, with 2^column_bits packs side by side
// and, in the rest of most_columns, other tiles.
struct WorkOfTiles {
  int column_bits;
  Work work;
};
[[nodiscard]] constexpr WorkOfTiles work_of_tiles(std::int64_t packs, int pack_size,
                                                  std::int64_t tiles, std::int64_t slices,
                                                  int most_columns, int most_threads,
                                                  std::int64_t multiprocessors) {
  const int columns = side_by_side(packs, most_columns);
  return {
      std::countr_zero(static_cast<unsigned>(columns)),
      work_of_warps(ceil_divide(packs, columns), slices, ceil_divide(tiles, most_columns / columns),
                    columns * pack_size, most_threads, multiprocessors)};
}

// The work of blocks of groups of group_threads threads, which sum `tiles` tiles of each channel;
// so many groups share a channel's tiles. As many as there are tiles, unless the device could not
// run the blocks at once: each block takes time to finish its channels, and finishes many in the
// time of one. Blocks have up to most_threads threads. Those of several channels have fewer if
// they do not reach all multiprocessors.
struct WorkOfGroups {
  int groups;
  Work work;
};
[[nodiscard]] constexpr WorkOfGroups work_of_groups(std::int64_t channels, std::int64_t tiles,
                                                    std::int64_t slices, int group_threads,
                                                    int most_threads, std::int64_t blocks_at_once,
                                                    std::int64_t multiprocessors) {
  int groups = 1;
  int threads = most_threads;
  int per_block = threads / group_threads;
  const auto blocks = [&](int shared) {
    return ceil_divide(channels, per_block / shared) * slices;
  };
  while (groups < per_block && groups < tiles && blocks(2 * groups) <= blocks_at_once) groups *= 2;
  while (groups < per_block && threads > kWarp && blocks(groups) < multiprocessors) {
    threads /= 2;
    per_block /= 2;
  }
  return {
      groups,
      {ceil_divide(channels, per_block / groups), slices, ceil_divide(tiles, groups), threads, 1}};
}

template <class Element, class Pointer>
[[nodiscard]] auto elements_of(const BasicTensorView<Pointer>& x) {
  using Pointed = std::conditional_t<std::is_same_v<Pointer, const void*>, const Element, Element>;
  return Elements<Pointed>{static_cast<Pointed*>(x.data),
                           x.samples,
                           x.channels,
                           x.positions,
                           x.sample_stride,
                           x.channel_stride,
                           x.position_stride};
}

// Whether packs of `bytes` can be taken from rows of channels: each row starts and ends at a
// multiple of `bytes`. Strides of extents of 1 do not matter.
template <class Pointer>
[[nodiscard]] bool has_packs_of_channels(const BasicTensorView<Pointer>& x, std::int64_t bytes) {
  const std::int64_t pack = bytes / size_of(x.dtype);
  return reinterpret_cast<std::uintptr_t>(x.data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         x.channels % pack == 0 && (x.samples <= 1 || x.sample_stride % pack == 0) &&
         (x.positions <= 1 || x.position_stride % pack == 0);
}

// Whether packs of `bytes` begin at the same elements of each plane of two tensors.
template <class Pointer, class OtherPointer>
[[nodiscard]] bool have_equal_packs_of_planes(const BasicTensorView<Pointer>& x,
                                              const BasicTensorView<OtherPointer>& other,
                                              std::int64_t bytes) {
  const std::int64_t pack = bytes / size_of(x.dtype);
  const std::uintptr_t distance =
      reinterpret_cast<std::uintptr_t>(x.data) - reinterpret_cast<std::uintptr_t>(other.data);
  return distance % static_cast<std::uintptr_t>(bytes) == 0 &&
         (x.samples <= 1 || (x.sample_stride - other.sample_stride) % pack == 0) &&
         (x.channels <= 1 || (x.channel_stride - other.channel_stride) % pack == 0);
}

}  // namespace normscope::cuda
