// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/formulas.h"
#include "normscope/core/limbs.h"
#include "normscope/kernels/cuda/last_block.cuh"

namespace normscope::cuda {

// Adds to a limb in memory. Most limbs are zero and are skipped.
__device__ inline void add_limb(const LimbsView& limbs, int sum, int k, std::int64_t c,
                                double value) {
  if (value != 0.0) atomicAdd(limbs.limb(sum, k) + c, value);
}

// The limbs of both sums of one channel, in a thread's registers.
class ThreadLimbs {
 public:
  NORMSCOPE_INLINE void add(int sum, double part) {
    for (int k = 0; k < kLimbs; ++k) {
      const double on_grid = round_to_grid(part, grid(k));
      limbs_[sum][k] += on_grid;
      part -= on_grid;
    }
  }

  // Real is the type of the arithmetic, and of the pivot.
  template <class Real>
  NORMSCOPE_INLINE void add_moments(double size, double pivot, double first, double second) {
    const TileMoments<double> tile = sizeof(Real) < sizeof(double)
                                         ? moments_about_narrow_pivot(size, pivot, first, second)
                                         : moments_about_zero(size, pivot, first, second);
    add(0, tile.sum.hi);
    add(0, tile.sum.lo);
    add(1, tile.sum_of_squares.hi);
    add(1, tile.sum_of_squares.lo);
    count_tile();
  }

  // The moments of a tile of one element: x and x^2. float64 holds the square of a float32 exactly.
  NORMSCOPE_INLINE void add_square(float x) {
    const auto wide = static_cast<double>(x);
    add(0, wide);
    add(1, wide * wide);
    count_tile();
  }
  NORMSCOPE_INLINE void add_square(double x) {
    const DoubleDouble<double> square = two_product(x, x);
    add(0, x);
    add(1, square.hi);
    add(1, square.lo);
    count_tile();
  }

  NORMSCOPE_INLINE void add_gradient_sums(double first, double second) {
    add(0, first);
    add(1, second);
    count_tile();
  }

  // The limbs of a sum in canonical form, which others can be added to exactly.
  NORMSCOPE_INLINE const double (&canonical(int sum)) [kLimbs] {
    canonicalize(limbs_[sum]);
    return limbs_[sum];
  }

  __device__ void add_to(const LimbsView& limbs, std::int64_t c) {
    for (int sum = 0; sum < kSums; ++sum) {
      const double (&values)[kLimbs] = canonical(sum);
      for (int k = 0; k < kLimbs; ++k) add_limb(limbs, sum, k, c, values[k]);
    }
  }

 private:
  NORMSCOPE_INLINE void count_tile() {
    if (++tiles_ < kTilesBetweenCarries) return;
    for (auto& limbs : limbs_) canonicalize(limbs);
    tiles_ = 0;
  }

  double limbs_[kSums][kLimbs] = {};
  std::int64_t tiles_ = 0;
};

// Where the warps of a block leave the limbs of one sum to be added up. Neighbouring threads write
// and read neighbouring numbers, each in a bank of its own.
template <int kWidth>
struct LimbExchange {
  double limbs[kBlockThreads / kWarp][kLimbs][kWidth * kWarp];
};

// Adds the limbs of one sum over the warps of a block, which leaves one atomic operation where each
// warp would have one. channel_of(thread, j) is the channel of own[j] in that thread of a warp. All
// threads of the block must call it.
template <int kSum, int kWidth, class ChannelOf>
__device__ void add_of_block(LimbExchange<kWidth>& exchange, ThreadLimbs (&own)[kWidth],
                             const LimbsView& limbs, const ChannelOf& channel_of) {
  for (int j = 0; j < kWidth; ++j) {
    const double (&values)[kLimbs] = own[j].canonical(kSum);
    for (int k = 0; k < kLimbs; ++k) {
      exchange.limbs[threadIdx.y][k][j * kWarp + static_cast<int>(threadIdx.x)] = values[k];
    }
  }
  __syncthreads();
  const int threads = kWarp * static_cast<int>(blockDim.y);
  for (int i = thread_of_block(); i < kLimbs * kWidth * kWarp; i += threads) {
    const int k = i / (kWidth * kWarp);
    const int place = i % (kWidth * kWarp);
    double total = 0.0;
    for (unsigned row = 0; row < blockDim.y; ++row) total += exchange.limbs[row][k][place];
    const std::int64_t channel = channel_of(place % kWarp, place / kWarp);
    if (channel < limbs.channels) add_limb(limbs, kSum, k, channel, total);
  }
  __syncthreads();
}

}  // namespace normscope::cuda
