// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/formulas.h"
#include "normscope/core/limbs.h"
#include "normscope/kernels/cuda/packs.cuh"

namespace normscope::cuda {

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

  NORMSCOPE_INLINE void add_moments(double size, double pivot, double first, double second) {
    const TileMoments<double> tile = moments_about_zero(size, pivot, first, second);
    add(0, tile.sum.hi);
    add(0, tile.sum.lo);
    add(1, tile.sum_of_squares.hi);
    add(1, tile.sum_of_squares.lo);
    count_tile();
  }

  NORMSCOPE_INLINE void add_gradient_sums(double first, double second) {
    add(0, first);
    add(1, second);
    count_tile();
  }

  // Adds them to limbs in memory, in canonical form, so that what others add besides stays exact.
  __device__ void add_to(const LimbsView& limbs, std::int64_t c) {
    for (int sum = 0; sum < kSums; ++sum) {
      canonicalize(limbs_[sum]);
      for (int k = 0; k < kLimbs; ++k) {
        if (limbs_[sum][k] != 0.0) atomicAdd(limbs.limb(sum, k) + c, limbs_[sum][k]);
      }
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

}  // namespace normscope::cuda
