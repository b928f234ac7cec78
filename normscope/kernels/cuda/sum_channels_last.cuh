// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/sum_channels_first.cuh"

namespace normscope::cuda {

// A block is kWarp packs of channels wide; each column of it has threads for the lanes of
// kTilesPerBlock tiles.
inline constexpr int kTileLanes = static_cast<int>(kChannelsLastTile.lanes);
inline constexpr std::int64_t kTileChain = kChannelsLastTile.chain;
inline constexpr int kTilesPerBlock = kBlockThreads / kWarp / kTileLanes;

// One number a channel and lane, for the threads of a tile to exchange.
template <class Real, int kPack>
struct LaneExchange {
  Real values[kTilesPerBlock][kTileLanes][kWarp][kPack];
};

// (l0 + l2) + (l1 + l3) of a channel.
template <class Real, int kPack>
__device__ Real fold_lanes(const LaneExchange<Real, kPack>& lanes, int tile, int j) {
  const auto lane = [&](int l) { return lanes.values[tile][l][threadIdx.x][j]; };
  return (lane(0) + lane(2)) + (lane(1) + lane(3));
}

// The sums of one channel of a tile in float64, by one thread alone: seldom needed.
template <class AnyTerms>
__device__ CenteredSums sums_in_float64(const AnyTerms& terms, const Tile& tile, std::int64_t c) {
  using Real = Arithmetic<typename AnyTerms::ElementType>;
  const auto run = terms.run(tile.sample, c, tile.begin);
  const std::int64_t stride = terms.x.position_stride;
  double center;
  if constexpr (AnyTerms::kHasPivot) {
    constexpr int kSamples = static_cast<int>(kChannelsLastTile.pivot_samples);
    const PivotSamples samples = pivot_samples(Layout::kChannelsLast, tile.size);
    double lanes[kSamples] = {};
    for (int l = 0; l < samples.count; ++l) {
      lanes[l] = static_cast<double>(widen(run.x[l * samples.stride * stride]));
    }
    for (int half = kSamples / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    center = static_cast<double>(static_cast<Real>(lanes[0] / static_cast<double>(samples.count)));
  } else {
    center = static_cast<double>(static_cast<Real>(terms.mean_hi[c]));
  }
  Terms<double> lanes[kTileLanes] = {};
  for (std::int64_t i = 0; i < tile.size; ++i) {
    const auto at = terms.run(tile.sample, c, tile.begin + i);
    const Terms<double> term = at.at(0, center);
    lanes[lane_of(Layout::kChannelsLast, i)].first += term.first;
    lanes[lane_of(Layout::kChannelsLast, i)].second += term.second;
  }
  return {center,
          {(lanes[0].first + lanes[2].first) + (lanes[1].first + lanes[3].first),
           (lanes[0].second + lanes[2].second) + (lanes[1].second + lanes[3].second)}};
}

// Adds the tiles of all channels to their limbs. blockIdx.x tells the channels; the tiles are
// shared by gridDim.y blocks. threadIdx.y tells tile and lane.
// Limits: 56 to 128 registers; bytes: 288 stack, 16 spilled, 16384 shared.
template <Access kAccess, class AnyTerms>
__global__ void __launch_bounds__(kBlockThreads)
    add_tiles_channels_last(AnyTerms terms, LimbsView limbs) {
  using Element = typename AnyTerms::ElementType;
  using Real = Arithmetic<Element>;
  constexpr int kPack = kPackSize<Element, kAccess>;
  // A pack's channels are shared out to the lanes' threads when tiles go into limbs.
  constexpr int kOwn = kPack > kTileLanes ? kPack / kTileLanes : 1;
  __shared__ LaneExchange<Real, kPack> exchange[2];

  const int slot = static_cast<int>(threadIdx.y) / kTileLanes;
  const int lane = static_cast<int>(threadIdx.y) % kTileLanes;
  const std::int64_t c = (std::int64_t{blockIdx.x} * kWarp + threadIdx.x) * kPack;
  const bool has_channels = c < limbs.channels;
  const std::int64_t positions = terms.x.positions;
  const std::int64_t tiles = terms.x.samples * tiles_per_sample(Layout::kChannelsLast, positions);
  ThreadLimbs own[kOwn];

  // All threads of a block make every turn: they meet at barriers.
  for (std::int64_t turn = std::int64_t{blockIdx.y} * kTilesPerBlock; turn < tiles;
       turn += std::int64_t{gridDim.y} * kTilesPerBlock) {
    Tile tile = tile_at<Layout::kChannelsLast>(turn + slot, tiles, positions);
    if (!has_channels) tile.size = 0;

    Real centers[kPack] = {};
    if constexpr (AnyTerms::kHasPivot) {
      const PivotSamples samples =
          tile.size > 0 ? pivot_samples(Layout::kChannelsLast, tile.size) : PivotSamples{0, 0};
      Real sums[kPack] = {};
      for (int l = lane; l < samples.count; l += kTileLanes) {
        const auto pack =
            load_pack<kPack>(terms.x.at(tile.sample, c, tile.begin + l * samples.stride));
        for (int j = 0; j < kPack; ++j) {
          const Real value = widen(pack.elements[j]);
          sums[j] = l == lane ? value : sums[j] + value;
        }
      }
      for (int j = 0; j < kPack; ++j) exchange[0].values[slot][lane][threadIdx.x][j] = sums[j];
      __syncthreads();
      for (int j = 0; j < kPack; ++j) {
        centers[j] = fold_lanes(exchange[0], slot, j) / static_cast<Real>(samples.count);
      }
      __syncthreads();
    } else if (tile.size > 0) {
      for (int j = 0; j < kPack; ++j) centers[j] = static_cast<Real>(terms.mean_hi[c + j]);
    }

    Real first[kPack] = {};
    Real second[kPack] = {};
    const std::int64_t end = smaller((lane + 1) * kTileChain, tile.size);
    for (std::int64_t i = lane * kTileChain; i < end; ++i) {
      Terms<Real> of_pack[kPack];
      terms.run(tile.sample, c, tile.begin + i).template pack_at<kPack, 1>(0, centers, of_pack);
      for (int j = 0; j < kPack; ++j) {
        first[j] += of_pack[j].first;
        second[j] += of_pack[j].second;
      }
    }
    for (int j = 0; j < kPack; ++j) {
      exchange[0].values[slot][lane][threadIdx.x][j] = first[j];
      exchange[1].values[slot][lane][threadIdx.x][j] = second[j];
    }
    __syncthreads();
    for (int j = lane; j < kPack && tile.size > 0; j += kTileLanes) {
      CenteredSums result{static_cast<double>(centers[j]),
                          {static_cast<double>(fold_lanes(exchange[0], slot, j)),
                           static_cast<double>(fold_lanes(exchange[1], slot, j))}};
      if (sizeof(Real) < sizeof(double) &&
          !(is_finite(result.sums.first) && is_finite(result.sums.second))) {
        result = sums_in_float64(terms, tile, c + j);
      }
      AnyTerms::add(own[j / kTileLanes], static_cast<double>(tile.size), result.center,
                    result.sums.first, result.sums.second);
    }
    __syncthreads();
  }
  for (int j = lane; j < kPack && has_channels; j += kTileLanes) {
    own[j / kTileLanes].add_to(limbs, c + j);
  }
}

// The same where a channel has one position: each element is a tile, and its own pivot. Threads are
// channels in x, rows in y.
// Limits: 40 to 80 registers; bytes: 0 stack, 0 spilled, 0 shared.
template <class AnyTerms>
__global__ void __launch_bounds__(kBlockThreads) add_elements(AnyTerms terms, LimbsView limbs) {
  const std::int64_t c = std::int64_t{blockIdx.x} * kWarp + threadIdx.x;
  if (c >= limbs.channels) return;
  const std::int64_t step = std::int64_t{gridDim.y} * blockDim.y;
  ThreadLimbs own;
  for (std::int64_t n = std::int64_t{blockIdx.y} * blockDim.y + threadIdx.y; n < terms.x.samples;
       n += step) {
    terms.add_element(own, n, c);
  }
  own.add_to(limbs, c);
}

}  // namespace normscope::cuda
