// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/apply.cuh"
#include "normscope/kernels/cuda/finalize.cuh"
#include "normscope/kernels/cuda/sum_channels_last.cuh"

namespace normscope::cuda {

// One kernel for all steps of a direction: if a block sums all elements of its channels, or a
// cluster of blocks does, it writes their outputs too, as soon as it has their coefficients. It
// waits for no other blocks. It reads the elements again: a block alone, from the first-level cache
// of its multiprocessor; a cluster, or ranks that exchange sums, from the second level, because a
// device empties the first one when it waits for others. There is one slice, and all tensors have
// packs.

// The most bytes of inputs that the blocks of a multiprocessor read at the same time, of its cache
// of 256 KB (H100), and those of a block, which should not keep others waiting.
inline constexpr std::int64_t kMostBytesInCache = 224 * 1024;
inline constexpr std::int64_t kMostBytesOfBlock = kMostBytesInCache / 2;

// The most blocks of a cluster that every device with clusters can run.
inline constexpr std::int64_t kMostInCluster = 8;

template <class User, class Apply>
struct AfterSumsAndApply : AfterSums<User> {
  Apply apply;
  Elements<typename Apply::ElementType> y;
  bool streams;

  [[nodiscard]] NORMSCOPE_INLINE bool lets_next_kernel_start() const { return false; }
};

// Channels first: each block has channels of its own. Warps take planes in turn. If there are fewer
// planes than warps, several share each of them.
template <class User, class Apply>
struct AfterSumsOfPlanes : AfterSumsAndApply<User, Apply> {
  using Base = AfterSumsAndApply<User, Apply>;
  using Base::apply, Base::y, Base::streams;

  __device__ void write_outputs(std::int64_t begin, std::int64_t end) const {
    __syncthreads();  // the coefficients are written
    const auto samples = static_cast<int>(y.samples);
    const int planes = static_cast<int>(end - begin) * samples;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    const int parts = planes < warps ? warps / planes : 1;
    for (int i = static_cast<int>(threadIdx.x) / kWarp; i < planes * parts; i += warps) {
      const int plane = planes - 1 - i / parts;
      const std::int64_t c = begin + plane / samples;
      apply_to_plane<Access::kPacks, false>(apply, y, 0, plane % samples, c, y.positions,
                                            {i % parts, parts}, streams);
    }
  }
};

// Channels last: the blocks of a column are a cluster. Each thread writes what it has summed.
template <class User, class Apply>
struct AfterSumsOfRows : AfterSumsAndApply<User, Apply> {
  using Base = AfterSumsAndApply<User, Apply>;
  using Base::apply, Base::y, Base::streams;
  static constexpr bool kHasClusters = true;

  int column_bits;

  __device__ void write_outputs(std::int64_t begin, std::int64_t end) const {
    meet_in_cluster();  // the last block has written the coefficients
    constexpr int kPack = kPackSize<typename Apply::ElementType, Access::kPacks>;
    const PlaceInTile place{column_bits, static_cast<int>(threadIdx.x)};
    const std::int64_t c = begin + place.column() * kPack;
    if (c >= end) return;
    const LoadedFormulas<kPack, Apply> formulas(apply, 0, c);
    const auto stride = [](const auto& tensor) { return tensor.position_stride; };
    const std::int64_t tiles = y.samples * tiles_per_sample(Layout::kChannelsLast, y.positions);
    const TurnsOfWarp turns(column_bits);
    for (std::int64_t turn = turns.first; turn < tiles; turn += turns.step) {
      const Tile tile = tile_at<Layout::kChannelsLast>(turn + place.tile(), tiles, y.positions);
      const std::int64_t first = place.lane() * kTileChain;
      const std::int64_t rows = smaller(tile.size - first, kTileChain);
      Walk<Apply, kPack> walk(apply, y, tile.sample, c, tile.begin + first, 0, rows - 1, 1, stride);
      walk.start();
      walk.write(streams, formulas);
    }
  }
};

}  // namespace normscope::cuda
