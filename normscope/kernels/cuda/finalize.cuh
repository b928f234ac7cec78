// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/formulas.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cuda/packs.cuh"

namespace normscope::cuda {

// One thread a channel, in both kernels. The count is read here: the host need not know it.

NORMSCOPE_INLINE DoubleDouble<double> canonical_total(const LimbsView& limbs, int sum,
                                                      std::int64_t c) {
  double values[kLimbs];
  for (int k = 0; k < kLimbs; ++k) values[k] = limbs.limb(sum, k)[c];
  canonicalize(values);
  return total(values);
}

// Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.
__global__ void finalize_moments(LimbsView limbs, const double* count, double eps, DType x_dtype,
                                 MutableStatistics statistics, RunningUpdate running) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= limbs.channels) return;
  const double n = *count;
  Moments<double> result{{0.0, 0.0}, 0.0};
  if (n > 0.0) result = moments(canonical_total(limbs, 0, c), canonical_total(limbs, 1, c), n);
  statistics.inv_std[c] = 1.0 / sqrt(result.population_variance + eps);
  if (n > 0.0) {
    update_running(running.mean, c, result.mean.hi, running.momentum);
    update_running(running.var, c, result.population_variance * (n / (n - 1.0)), running.momentum);
  }
  double hi = result.mean.hi;
  double lo = result.mean.lo;
  if (x_dtype != DType::kFloat64) {
    hi = static_cast<double>(static_cast<float>(result.mean.hi));
    lo = static_cast<double>(static_cast<float>((result.mean.hi - hi) + result.mean.lo));
  }
  statistics.mean_hi[c] = hi;
  statistics.mean_lo[c] = lo;
}

// Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.
__global__ void finalize_gradient_sums(LimbsView limbs, Statistics statistics, GradientSums sums) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= limbs.channels) return;
  const DoubleDouble<double> dy = canonical_total(limbs, 0, c);
  sums.dy[c] = dy.hi + dy.lo;
  sums.dy_xhat[c] = gradient_sum_with_xhat(dy, canonical_total(limbs, 1, c), statistics.mean_lo[c],
                                           statistics.inv_std[c]);
}

}  // namespace normscope::cuda
