// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <unistd.h>

#include "normscope/core/cache_lines.h"
#include "normscope/core/execution.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tensor_view.h"
#include "normscope/core/tiles.h"
#include "normscope/kernels/cpu/target.h"

// How a tensor's work is split among threads, and how its outputs are stored.

namespace normscope::cpu {

// Below this many elements a second thread costs more than it saves: waking one takes about 5 us,
// in which a core sums some ten thousand elements.
inline constexpr std::int64_t kElementsPerThread = 16384;

// The same for channels whose sums become statistics or coefficients.
inline constexpr std::int64_t kChannelsPerThread = 256;

// The size of a run in bytes from which streaming stores pay off, even if the ends of the run share
// cache lines with cached stores and wait for them. Measured between float32 planes of 33x33 and
// 129x129.
inline constexpr std::int64_t kStreamedRun = 128 * kCacheLine;

// The smallest part of a row, in bytes, that is worth giving to a thread: the hardware prefetches
// shorter ones badly.
inline constexpr std::int64_t kRowOfThread = 2048;

// The size of a core's L2 in bytes; 1 MiB if the system does not report it.
inline std::int64_t cache_per_core() {
  static const std::int64_t kBytes = [] {
    const long reported = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return reported > 0 ? std::int64_t{reported} : std::int64_t{1} << 20;
  }();
  return kBytes;
}

inline std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// `count` numbers, rounded up to whole cache lines.
template <class Number>
std::int64_t whole_lines(std::int64_t count) {
  const std::size_t bytes = whole_cache_lines(static_cast<std::size_t>(count) * sizeof(Number));
  return static_cast<std::int64_t>(bytes / sizeof(Number));
}

inline std::int64_t tile_count(const TensorView& x) {
  return x.samples * tiles_per_sample(x.layout(), x.positions);
}

// Part `i` of [0, n) split into `parts` of nearly equal length.
inline TileRange part_of(std::int64_t n, std::int64_t parts, std::int64_t i) {
  return {n * i / parts, n * (i + 1) / parts};
}

inline std::int64_t useful_threads(std::int64_t threads, const TensorView& x) {
  const std::int64_t elements = x.channels * x.elements_per_channel();
  return std::clamp<std::int64_t>(elements / kElementsPerThread, 1, threads);
}

// Work is split by channels if the threads' channels are far enough apart in memory, otherwise by
// tiles. With tiles every thread needs its own limbs for all channels, and adding them up takes
// time.
inline bool splits_by_channel(const TensorView& x, std::int64_t threads) {
  if (x.layout() == Layout::kChannelsFirst) return x.channels >= threads;
  const std::int64_t row = x.channels / threads * size_of(x.dtype);
  return x.channels % threads == 0 && row % kCacheLine == 0 && row >= kRowOfThread;
}

// Calls sweep(channels, tiles) for parts that together cover the tensor.
template <class Sweep>
void for_parts(const Execution& execution, const TensorView& x, const Sweep& sweep) {
  const std::int64_t threads = useful_threads(execution.threads, x);
  const TileRange all_channels{0, x.channels};
  const TileRange all_tiles{0, tile_count(x)};
  if (threads == 1) {
    sweep(all_channels, all_tiles);
  } else if (splits_by_channel(x, threads)) {
    execution.parallel_for(
        threads, [&](std::int64_t i) { sweep(part_of(x.channels, threads, i), all_tiles); });
  } else {
    execution.parallel_for(
        threads, [&](std::int64_t i) { sweep(all_channels, part_of(all_tiles.end, threads, i)); });
  }
}

// Calls work(channels) for ranges that together cover all channels.
template <class Work>
void for_channels(const Execution& execution, std::int64_t channels, const Work& work) {
  const std::int64_t threads =
      std::clamp<std::int64_t>(channels / kChannelsPerThread, 1, execution.threads);
  if (threads == 1) {
    work(TileRange{0, channels});
  } else {
    execution.parallel_for(threads, [&](std::int64_t i) { work(part_of(channels, threads, i)); });
  }
}

// Calls sum(channels, tiles, limbs) for parts that together cover the tensor. Parts that share
// channels get their own limbs. No call gets more tiles than limbs can count.
template <class Sum>
void sum_parts(const Execution& execution, const TensorView& x, const Target& target,
               LimbsView limbs, const Sum& sum) {
  const auto sum_into = [&](TileRange channels, TileRange tiles, LimbsView into) {
    for (std::int64_t begin = tiles.begin; begin < tiles.end; begin += kTilesBetweenCarries) {
      sum(channels, TileRange{begin, std::min(begin + kTilesBetweenCarries, tiles.end)}, into);
      target.canonicalize(into);
    }
  };
  const std::int64_t threads = useful_threads(execution.threads, x);
  if (threads == 1 || splits_by_channel(x, threads)) {
    for_parts(execution, x, [&](TileRange channels, TileRange tiles) {
      sum_into(channels, tiles, limbs.channel_range(channels.begin, channels.end));
    });
    return;
  }
  // The distance between the limbs of two threads, which share no cache line.
  const std::int64_t stride = whole_lines<double>(limbs_size(x.channels));
  AlignedVector<double> storage(static_cast<std::size_t>(threads * stride));
  const auto own_limbs = [&](std::int64_t i) {
    return LimbsView{storage.data() + i * stride, x.channels, x.channels};
  };
  execution.parallel_for(threads, [&](std::int64_t i) {
    sum_into({0, x.channels}, part_of(tile_count(x), threads, i), own_limbs(i));
  });
  for (std::int64_t i = 0; i < threads; ++i) target.add_limbs(own_limbs(i), limbs);
  target.canonicalize(limbs);
}

// Outputs bypass the cache if they would not fit in it anyway, and if their runs are whole cache
// lines, or so long that the ends do not matter. This makes the ops of networks about 6 % faster
// (docs/performance.md).
inline Stores stores_for(const MutableTensorView& y) {
  const bool is_channels_first = y.layout() == Layout::kChannelsFirst;
  const std::int64_t run = (is_channels_first ? y.positions : y.channels) * size_of(y.dtype);
  const bool has_whole_lines = run >= kStreamedRun || run % kCacheLine == 0;
  const std::int64_t bytes = y.channels * y.elements_per_channel() * size_of(y.dtype);
  const bool fits = bytes <= cache_per_core();
  return has_whole_lines && !fits ? Stores::kStreaming : Stores::kCached;
}

}  // namespace normscope::cpu
