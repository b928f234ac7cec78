// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "normscope/core/tensor_view.h"

namespace normscope {

// A tile is a fixed range of the positions of one sample and channel, summed in one fixed tree:
// lanes that each add a chain of elements in order, folded in halves. It depends on the layout and
// on the number of positions only, so that no split over samples, threads or instruction sets
// changes a bit: docs/numerics.md, section "Tiles". Backends share these numbers; changing one
// changes all results.
struct TileShape {
  std::int64_t positions;      // of a full tile
  std::int64_t lanes;          // a power of two
  std::int64_t chain;          // elements that a lane adds at most
  std::int64_t pivot_samples;  // elements at most that the pivot is the mean of
};

// Lane l takes the positions l, l + 64, l + 128, ... of its tile: neighbours in memory.
inline constexpr TileShape kChannelsFirstTile{2048, 64, 32, 64};

// Lane l takes the positions 32 l ... 32 l + 31 of its tile: neighbours in memory are channels.
inline constexpr TileShape kChannelsLastTile{128, 4, 32, 8};

inline constexpr std::int64_t kMaxLanes = 64;

[[nodiscard]] constexpr const TileShape& tile_shape(Layout layout) noexcept {
  return layout == Layout::kChannelsFirst ? kChannelsFirstTile : kChannelsLastTile;
}

// The lane that adds the tile's element at `position`.
[[nodiscard]] constexpr std::int64_t lane_of(Layout layout, std::int64_t position) noexcept {
  return layout == Layout::kChannelsFirst ? position % kChannelsFirstTile.lanes
                                          : position / kChannelsLastTile.chain;
}

[[nodiscard]] constexpr std::int64_t tiles_per_sample(Layout layout,
                                                      std::int64_t positions) noexcept {
  const std::int64_t size = tile_shape(layout).positions;
  return (positions + size - 1) / size;
}

// The pivot of a tile of n elements is the mean of `count` of them, `stride` apart, beginning with
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
