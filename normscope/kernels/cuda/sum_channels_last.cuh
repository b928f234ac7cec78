// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/sum_channels_first.cuh"

namespace normscope::cuda {

// A warp sums tiles together. Its threads are as many packs of channels side by side as there are,
// up to kMostColumns, times the lanes of a tile, times as many tiles as are left room for: narrow
// tensors fill it too.
inline constexpr int kTileLanes = static_cast<int>(kChannelsLastTile.lanes);
inline constexpr int kTileChain = static_cast<int>(kChannelsLastTile.chain);
inline constexpr int kMostColumns = kWarp / kTileLanes;

inline constexpr int kTileThreads = 128;

// How many blocks a multiprocessor must have registers for, beside the packs in flight. Packs of
// narrow elements have more channels, whose sums take more registers.
template <class Element>
inline constexpr int kTileBlocks = sizeof(Element) < sizeof(float) ? 3 : 4;

// A thread's place in its warp, which has 2^column_bits columns: a division by a number of columns
// would take as long as to load a pack.
struct PlaceInTile {
  int column_bits;
  int thread;

  NORMSCOPE_INLINE int column() const { return thread & ((1 << column_bits) - 1); }
  NORMSCOPE_INLINE int lane() const { return (thread >> column_bits) % kTileLanes; }
  NORMSCOPE_INLINE int tile() const { return (thread >> column_bits) / kTileLanes; }
  NORMSCOPE_INLINE int thread_of_lane(int lane) const {
    return thread + (lane - this->lane()) * (1 << column_bits);
  }
};

// The turns in which a warp takes the tiles of its columns, which gridDim.y blocks share.
struct TurnsOfWarp {
  std::int64_t first;
  std::int64_t step;

  __device__ explicit TurnsOfWarp(int column_bits) {
    const int tiles_per_warp = kMostColumns >> column_bits;
    first = (std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y) * tiles_per_warp;
    step = std::int64_t{gridDim.y} * blockDim.y * tiles_per_warp;
  }
};

// The four threads of a tile share the channels of their packs among them, neighbours together. If
// there are fewer channels than threads, some threads have none.
template <int kPack>
struct Share {
  static constexpr int kSize = kPack > kTileLanes ? kPack / kTileLanes : 1;

  static NORMSCOPE_INLINE bool is_owner(int lane) { return lane * kPack % kTileLanes == 0; }
  static NORMSCOPE_INLINE int first(int lane) { return lane * kPack / kTileLanes; }
  // The thread that has the share with channel j, in the tile of `place`.
  static NORMSCOPE_INLINE int owner(const PlaceInTile& place, int j) {
    return place.thread_of_lane(j * kTileLanes / kPack);
  }
};

// One step of a sum over the lanes of a tile: adds the values of two threads. If there are several,
// each of the two goes on with half of them.
template <int kSize, class Real>
__device__ void add_halves(Real* values, bool is_upper, int distance) {
  if constexpr (kSize == 1) {
    values[0] += __shfl_xor_sync(kWholeWarp, values[0], distance);
  } else {
    NORMSCOPE_UNROLL
    for (int j = 0; j < kSize / 2; ++j) {
      const Real lower = values[j];
      const Real upper = values[j + kSize / 2];
      values[j] = (is_upper ? upper : lower) +
                  __shfl_xor_sync(kWholeWarp, is_upper ? lower : upper, distance);
    }
  }
}

// (l0 + l2) + (l1 + l3): the sums of a thread's share of the channels are then the first of its
// values. The whole warp must take part.
template <int kPack, class Real>
__device__ void fold_lanes(Real (&values)[kPack], const PlaceInTile& place) {
  const int columns = 1 << place.column_bits;
  add_halves<kPack>(values, place.lane() >= 2, 2 * columns);
  add_halves<(kPack > 1 ? kPack / 2 : 1)>(values, place.lane() % 2 == 1, columns);
}

// Sums one channel of a tile in float64, in a single thread. Rarely needed.
template <class AnyTerms>
__device__ CenteredSums sums_in_float64(const AnyTerms& terms, std::int64_t slice, const Tile& tile,
                                        std::int64_t c) {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  double center;
  if constexpr (AnyTerms::kHasPivot) {
    static_assert(kChannelsLastTile.pivot_samples == 8);
    const PivotSamples samples = pivot_samples(Layout::kChannelsLast, tile.size);
    const auto x = [&](int l) {
      const std::int64_t p = tile.begin + l * samples.stride;
      return l < samples.count ? static_cast<double>(widen(*terms.x.at(tile.sample, c, p))) : 0.0;
    };
    const double sum = ((x(0) + x(4)) + (x(2) + x(6))) + ((x(1) + x(5)) + (x(3) + x(7)));
    center = static_cast<double>(static_cast<Real>(sum / static_cast<double>(samples.count)));
  } else {
    center = static_cast<double>(static_cast<Real>(terms.mean(slice, c)));
  }
  // Lanes in the order 0, 2, 1, 3: those that are added first are then neighbours.
  Terms<double> pair = {};
  Terms<double> total = {};
  NORMSCOPE_DO_NOT_UNROLL
  for (int i = 0; i < kTileLanes; ++i) {
    const int lane = i % 2 * 2 + i / 2;
    Terms<double> sums = {};
    const std::int64_t end = smaller((lane + 1) * kTileChain, tile.size);
    NORMSCOPE_DO_NOT_UNROLL
    for (std::int64_t p = lane * kTileChain; p < end; ++p) {
      Terms<double> term[1];
      const auto run = terms.run(tile.sample, c, tile.begin + p);
      AnyTerms::of_row(run.template load<1>(0), &center, term);
      sums = {sums.first + term[0].first, sums.second + term[0].second};
    }
    if (i % 2 == 0) {
      pair = sums;
      continue;
    }
    pair = {pair.first + sums.first, pair.second + sums.second};
    total = i == 1 ? pair : Terms<double>{total.first + pair.first, total.second + pair.second};
  }
  return {center, total};
}

// The pivots of a tile, for the channels of a pack and for a thread's share of them. The whole warp
// must take part.
template <int kPack, class Element, class Real = Arithmetic<Element>>
__device__ void find_pivots(const Elements<const Element>& x, std::int64_t c, const Tile& tile,
                            const PlaceInTile& place, Real (&pivots)[kPack],
                            Real (&own_pivots)[Share<kPack>::kSize]) {
  using Own = Share<kPack>;
  const PivotSamples samples =
      tile.size > 0 ? pivot_samples(Layout::kChannelsLast, tile.size) : PivotSamples{0, 0};
  Real sums[kPack] = {};
  for (int l = place.lane(); l < samples.count; l += kTileLanes) {
    Real values[kPack];
    widen_pack(load_pack<kPack>(x.at(tile.sample, c, tile.begin + l * samples.stride)), values);
    for (int j = 0; j < kPack; ++j) sums[j] = l < kTileLanes ? values[j] : sums[j] + values[j];
  }
  fold_lanes(sums, place);
  for (int j = 0; j < Own::kSize; ++j) own_pivots[j] = sums[j] / static_cast<Real>(samples.count);
  for (int j = 0; j < kPack; ++j) {
    pivots[j] = __shfl_sync(kWholeWarp, own_pivots[j % Own::kSize], Own::owner(place, j), kWarp);
  }
}

// Adds the tiles of all channels to their limbs. blockIdx.x selects 2^column_bits packs, gridDim.y
// blocks share the tiles, gridDim.z blocks the slices.
// Limits: 56 to 168 registers; bytes: 0 stack, 0 spilled, 10256 shared.
// Loop: at least 8 loads; at least 11 before the first shuffle.
template <Access kAccess, class AnyTerms, class After>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<typename AnyTerms::ElementType>)
    add_tiles_channels_last(AnyTerms terms, int column_bits, NormBatches batches,
                            DeviceScratch scratch, After after) {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  constexpr int kPack = kPackSize<typename AnyTerms::ElementType, kAccess>;
  using Own = Share<kPack>;
  __shared__ LimbExchange<Own::kSize, kTileThreads> exchange;

  const PlaceInTile place{column_bits, static_cast<int>(threadIdx.x)};
  const TurnsOfWarp turns(column_bits);
  const std::int64_t channels_per_block = std::int64_t{kPack} << column_bits;
  const std::int64_t first_channel = std::int64_t{blockIdx.x} * channels_per_block;
  const auto channel_of = [&](const PlaceInTile& other, int j) {
    return first_channel + other.column() * kPack + Own::first(other.lane()) + j;
  };
  const std::int64_t c = first_channel + place.column() * kPack;
  const bool has_channels = c < scratch.channels;
  const std::int64_t positions = terms.x.positions;
  const auto next = [&](auto& run) { terms.next_position(run); };
  for (std::int64_t slice = blockIdx.z; slice < batches.slices; slice += gridDim.z) {
    const std::int64_t tiles =
        batches.samples_of(slice) * tiles_per_sample(Layout::kChannelsLast, positions);
    ThreadLimbs own[Own::kSize];
    Real centers[kPack] = {};
    if constexpr (!AnyTerms::kHasPivot) {
      for (int j = 0; j < kPack && has_channels; ++j) {
        centers[j] = static_cast<Real>(terms.mean(slice, c + j));
      }
    }

    // All threads of a warp must run every iteration, because they fold together.
    for (std::int64_t turn = turns.first; turn < tiles; turn += turns.step) {
      Tile tile = tile_at<Layout::kChannelsLast>(turn + place.tile(), tiles, positions);
      tile.sample += batches.first_sample(slice);
      if (!has_channels) tile.size = 0;
      const int begin = place.lane() * kTileChain;
      Rows<kPack, Real, AnyTerms, decltype(next)> rows(
          terms.run(tile.sample, c, tile.begin + begin),
          static_cast<int>(smaller(tile.size - begin, kTileChain)), next);
      Real own_centers[Own::kSize] = {};  // the gradient sums need none
      if constexpr (AnyTerms::kHasPivot) {
        find_pivots(terms.x, c, tile, place, centers, own_centers);
      }
      PackSums<kPack, Real> sums;
      rows.add_to(sums, centers);
      fold_lanes(sums.first, place);
      fold_lanes(sums.second, place);
      if (tile.size == 0 || !Own::is_owner(place.lane())) continue;
      for (int j = 0; j < Own::kSize; ++j) {
        CenteredSums result{
            static_cast<double>(own_centers[j]),
            {static_cast<double>(sums.first[j]), static_cast<double>(sums.second[j])}};
        if (sizeof(Real) < sizeof(double) &&
            !(is_finite(result.sums.first) && is_finite(result.sums.second))) {
          result = sums_in_float64(terms, slice, tile, channel_of(place, j));
        }
        AnyTerms::add(own[j], static_cast<double>(tile.size), result.center, result.sums.first,
                      result.sums.second);
      }
    }
    if (after.lets_next_kernel_start()) let_next_kernel_start();
    const auto owned_channel = [&](int thread, int j) {
      const PlaceInTile other{column_bits, thread};
      return Own::is_owner(other.lane()) ? channel_of(other, j) : scratch.channels;
    };
    add_of_block(exchange, own, limbs_of_block(scratch, slice), owned_channel);
  }
  finish_channels(scratch, first_channel, first_channel + channels_per_block, after);
}

}  // namespace normscope::cuda
