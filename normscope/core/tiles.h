// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "normscope/core/tensor_view.h"

namespace normscope {

// A tile is a fixed range of the positions of one sample and channel. It is summed in one fixed
// tree: lanes that each add a chain of elements in order, folded in halves. The tree depends only
// on the layout and on the number of positions. The bits therefore do not depend on how the work is
// split over samples, threads or instruction sets: docs/numerics.md, section "Tiles". All backends
// share these numbers; changing one changes all results.
struct TileShape {
  std::int64_t positions;      // of a full tile
  std::int64_t lanes;          // a power of two
  std::int64_t chain;          // the most elements that a lane adds
  std::int64_t pivot_samples;  // the pivot is the mean of at most so many elements
};

// Returned by value: device code cannot refer to the host's objects.
[[nodiscard]] constexpr TileShape tile_shape(Layout layout) noexcept {
  if (layout == Layout::kChannelsFirst) return {2048, 64, 32, 64};
  return {128, 4, 32, 8};
}

// Lane l takes the positions l, l + 64, l + 128, ... of its tile: neighbours in memory.
inline constexpr TileShape kChannelsFirstTile = tile_shape(Layout::kChannelsFirst);

// Lane l takes the positions 32 l ... 32 l + 31 of its tile: neighbours in memory are channels.
inline constexpr TileShape kChannelsLastTile = tile_shape(Layout::kChannelsLast);

inline constexpr std::int64_t kMaxLanes = 64;

// The lane that adds the tile's element at `position`.
[[nodiscard]] constexpr std::int64_t lane_of(Layout layout, std::int64_t position) noexcept {
  const TileShape shape = tile_shape(layout);
  return layout == Layout::kChannelsFirst ? position % shape.lanes : position / shape.chain;
}

[[nodiscard]] constexpr std::int64_t tiles_per_sample(Layout layout,
                                                      std::int64_t positions) noexcept {
  const std::int64_t size = tile_shape(layout).positions;
  return (positions + size - 1) / size;
}

// The pivot of a tile of n elements is the mean of `count` of them, `stride` apart, starting with
// the first.
struct PivotSamples {
  std::int64_t count;
  std::int64_t stride;
};

[[nodiscard]] constexpr PivotSamples pivot_samples(Layout layout, std::int64_t n) noexcept {
  const std::int64_t count = std::min(n, tile_shape(layout).pivot_samples);
  return {count, n / count};
}

}  // namespace normscope
