// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
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

  template <class Few>
  NORMSCOPE_INLINE void add_few(int sum, const Few& few) {
    few.add_to(limbs_[sum]);
    canonicalize(limbs_[sum]);
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

// Sums of numbers that are below 2^29 grid(kFirst) and multiples of grid(kLast): they have no part
// on the other grids, and nothing is rounded away. Holds at most kTilesBetweenCarries of them.
template <int kFirst, int kLast>
class FewLimbs {
 public:
  NORMSCOPE_INLINE FewLimbs() {
    for (int k = kFirst; k < kLast; ++k) limbs_[k - kFirst] = shift(k);
  }

  // A double near shift(k) is a multiple of grid(k), so that the addition itself rounds the number
  // to the grid. Whether a tie goes up or down does not matter: the next limbs get what is left.
  NORMSCOPE_INLINE void add(double number) {
    for (int k = kFirst; k < kLast; ++k) {
      const double sum = limbs_[k - kFirst] + number;
      number -= sum - limbs_[k - kFirst];
      limbs_[k - kFirst] = sum;
    }
    limbs_[kLast - kFirst] += number;
  }

  NORMSCOPE_INLINE void add_to(double (&limbs)[kLimbs]) const {
    for (int k = kFirst; k < kLast; ++k) limbs[k] += limbs_[k - kFirst] - shift(k);
    limbs[kLast] += limbs_[kLast - kFirst];
  }

 private:
  // The middle of the doubles whose last bit is grid(k).
  static NORMSCOPE_INLINE constexpr double shift(int k) { return 1.5 * 0x1p52 * grid(k); }

  double limbs_[kLast - kFirst + 1] = {};
};

// Finds out how large numbers are. Without the sign, the bits of floats are in the order of their
// values. One less than the bits of a zero is the largest number, so that zeros are not the
// smallest.
class Magnitudes {
 public:
  NORMSCOPE_INLINE void add(float number) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(number) & 0x7FFFFFFFU;
    largest_ = bits > largest_ ? bits : largest_;
    smallest_less_one_ = bits - 1U < smallest_less_one_ ? bits - 1U : smallest_less_one_;
  }

  // Whether all are 0 or at least `least`, and all are below `end`.
  [[nodiscard]] NORMSCOPE_INLINE bool within(float least, float end) const {
    return largest_ < std::bit_cast<std::uint32_t>(end) &&
           smallest_less_one_ >= std::bit_cast<std::uint32_t>(least) - 1U;
  }

 private:
  std::uint32_t largest_ = 0;
  std::uint32_t smallest_less_one_ = ~std::uint32_t{0};
};

// Where the warps of a block leave the limbs of one sum to be added up. Neighbouring threads write
// and read neighbouring numbers, each in a bank of its own.
template <int kWidth, int kThreads>
struct LimbExchange {
  double limbs[kThreads / kWarp][kLimbs][kWidth * kWarp];

  static NORMSCOPE_INLINE int place(int thread, int j) { return j * kWarp + thread; }
};

// Adds the limbs of one sum over the warps of a block, which leaves one atomic operation where each
// warp would have one. channel_of(thread, j) is the channel of own[j] in that thread of a warp. All
// threads of the block must call it.
template <int kSum, int kWidth, int kThreads, class ChannelOf>
__device__ void add_over_warps(LimbExchange<kWidth, kThreads>& exchange, ThreadLimbs (&own)[kWidth],
                               const LimbsView& limbs, const ChannelOf& channel_of) {
  for (int j = 0; j < kWidth; ++j) {
    const double (&values)[kLimbs] = own[j].canonical(kSum);
    for (int k = 0; k < kLimbs; ++k) {
      exchange.limbs[threadIdx.y][k][exchange.place(static_cast<int>(threadIdx.x), j)] = values[k];
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

// Adds the limbs of both sums of a block. A single warp has nothing to exchange.
template <int kWidth, int kThreads, class ChannelOf>
__device__ void add_of_block(LimbExchange<kWidth, kThreads>& exchange, ThreadLimbs (&own)[kWidth],
                             const LimbsView& limbs, const ChannelOf& channel_of) {
  if (blockDim.y > 1) {
    add_over_warps<0>(exchange, own, limbs, channel_of);
    add_over_warps<1>(exchange, own, limbs, channel_of);
    return;
  }
  for (int j = 0; j < kWidth; ++j) {
    const std::int64_t channel = channel_of(static_cast<int>(threadIdx.x), j);
    if (channel < limbs.channels) own[j].add_to(limbs, channel);
  }
}

}  // namespace normscope::cuda
