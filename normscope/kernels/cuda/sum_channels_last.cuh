// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/cuda/sum_channels_first.cuh"

namespace normscope::cuda {

// A block is kWarp packs of channels wide. Each of its columns has one thread for every lane of
// kTilesPerBlock tiles.
inline constexpr int kTileLanes = static_cast<int>(kChannelsLastTile.lanes);
inline constexpr std::int64_t kTileChain = kChannelsLastTile.chain;
inline constexpr int kTilesPerBlock = kBlockThreads / kWarp / kTileLanes;

// One number per channel and lane, which the threads of a tile exchange.
template <class Real, int kPack>
struct LaneExchange {
  Real values[kTilesPerBlock][kTileLanes][kWarp][kPack];
};

// (l0 + l2) + (l1 + l3) of one channel.
template <class Real, int kPack>
__device__ Real fold_lanes(const LaneExchange<Real, kPack>& lanes, int tile, int j) {
  const auto lane = [&](int l) { return lanes.values[tile][l][threadIdx.x][j]; };
  return (lane(0) + lane(2)) + (lane(1) + lane(3));
}

// Sums one channel of a tile in float64, in a single thread. Rarely needed.
template <class AnyTerms>
__device__ CenteredSums sums_in_float64(const AnyTerms& terms, std::int64_t slice, const Tile& tile,
                                        std::int64_t c) {
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
    center = static_cast<double>(static_cast<Real>(terms.mean(slice, c)));
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

// Adds the tiles of all channels to their limbs. blockIdx.x selects the channels, threadIdx.y the
// tile and the lane. gridDim.y blocks share the tiles, gridDim.z blocks the slices.
// Limits: 56 to 128 registers; bytes: 288 stack, 16 spilled, 16400 shared.
template <Access kAccess, class AnyTerms, class After>
__global__ void __launch_bounds__(kBlockThreads)
    add_tiles_channels_last(AnyTerms terms, NormBatches batches, DeviceScratch scratch,
                            After after) {
  using Element = typename AnyTerms::ElementType;
  using Real = Arithmetic<Element>;
  constexpr int kPack = kPackSize<Element, kAccess>;
  // When tile sums go into limbs, the threads of the lanes divide the channels of a pack.
  constexpr int kOwn = kPack > kTileLanes ? kPack / kTileLanes : 1;
  __shared__ LaneExchange<Real, kPack> exchange[2];

  const int slot = static_cast<int>(threadIdx.y) / kTileLanes;
  const int lane = static_cast<int>(threadIdx.y) % kTileLanes;
  const std::int64_t first_channel = std::int64_t{blockIdx.x} * kWarp * kPack;
  const std::int64_t c = first_channel + std::int64_t{threadIdx.x} * kPack;
  const bool has_channels = c < scratch.channels;
  const std::int64_t positions = terms.x.positions;
  for (std::int64_t slice = blockIdx.z; slice < batches.slices; slice += gridDim.z) {
    const std::int64_t tiles =
        batches.samples_of(slice) * tiles_per_sample(Layout::kChannelsLast, positions);
    ThreadLimbs own[kOwn];

    // All threads of a block must run every iteration, because they meet at barriers.
    for (std::int64_t turn = std::int64_t{blockIdx.y} * kTilesPerBlock; turn < tiles;
         turn += std::int64_t{gridDim.y} * kTilesPerBlock) {
      Tile tile = tile_at<Layout::kChannelsLast>(turn + slot, tiles, positions);
      tile.sample += batches.first_sample(slice);
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
        for (int j = 0; j < kPack; ++j) centers[j] = static_cast<Real>(terms.mean(slice, c + j));
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
          result = sums_in_float64(terms, slice, tile, c + j);
        }
        AnyTerms::add(own[j / kTileLanes], static_cast<double>(tile.size), result.center,
                      result.sums.first, result.sums.second);
      }
      __syncthreads();
    }
    for (int j = lane; j < kPack && has_channels; j += kTileLanes) {
      own[j / kTileLanes].add_to(scratch.limbs(slice), c + j);
    }
  }
  finish_channels(scratch, batches, first_channel, first_channel + kWarp * kPack, after);
}

}  // namespace normscope::cuda
