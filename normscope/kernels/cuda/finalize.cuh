// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/formulas.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cuda/packs.cuh"

namespace normscope::cuda {

// One thread a channel, in both kernels. The count is read here: the host need not know it.

// Limbs of one sum and channel, in canonical form.
struct CanonicalLimbs {
  double values[kLimbs];

  NORMSCOPE_INLINE CanonicalLimbs(const LimbsView& limbs, int sum, std::int64_t c) {
    for (int k = 0; k < kLimbs; ++k) values[k] = limbs.limb(sum, k)[c];
    canonicalize(values);
  }
};

NORMSCOPE_INLINE DoubleDouble<double> canonical_total(const LimbsView& limbs, int sum,
                                                      std::int64_t c) {
  return total(CanonicalLimbs(limbs, sum, c).values);
}

// Brings the limbs of a message into canonical form, and writes its header.
// Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.
__global__ void seal_message(LimbsView limbs, Header header, double* header_at) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c == 0) {
    for (int i = 0; i < kHeaderSize; ++i) header_at[i] = header.fields[i];
  }
  if (c >= limbs.channels) return;
  for (int sum = 0; sum < kSums; ++sum) {
    const CanonicalLimbs canonical(limbs, sum, c);
    for (int k = 0; k < kLimbs; ++k) limbs.limb(sum, k)[c] = canonical.values[k];
  }
}

// A kernel of its own, since finalize_moments counts the update while its other blocks still read.
// Limits: 8 to 32 registers; bytes: 0 stack, 0 spilled, 0 shared.
__global__ void set_cumulative_momentum(const std::int64_t* updates, double* momentum) {
  *momentum = cumulative_momentum(*updates);
}

// Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.
__global__ void finalize_moments(LimbsView limbs, Count count, double eps, DType x_dtype,
                                 MomentsResults results) {
  const auto& [statistics, running, pooled, count_out] = results;
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const double n = count.value();
  if (c == 0) {
    count.report_error();
    if (count_out != nullptr) *count_out = n;
    if (n > 0.0) running.count();
  }
  if (c >= limbs.channels) return;
  for (int sum = 0; sum < kSums && pooled.data != nullptr; ++sum) {
    const CanonicalLimbs canonical(limbs, sum, c);
    for (int k = 0; k < kLimbs; ++k) pooled.limb(sum, k)[c] += canonical.values[k];
  }
  Moments<double> result{{0.0, 0.0}, 0.0};
  if (n != 0.0) result = moments(canonical_total(limbs, 0, c), canonical_total(limbs, 1, c), n);
  statistics.inv_std[c] = 1.0 / sqrt(result.population_variance + eps);
  if (n > 0.0) {
    const double momentum = running.weight();
    update_running(running.mean, c, result.mean.hi, momentum);
    update_running(running.var, c, result.population_variance * (n / (n - 1.0)), momentum);
  }
  const DoubleDouble<double> mean =
      x_dtype == DType::kFloat64 ? result.mean : float32_pair(result.mean);
  statistics.mean_hi[c] = mean.hi;
  statistics.mean_lo[c] = mean.lo;
}

// Limits: 24 to 64 registers; bytes: 0 stack, 0 spilled, 0 shared.
__global__ void finalize_gradient_sums(LimbsView limbs, Count count, Statistics statistics,
                                       GradientResults results) {
  const std::int64_t c = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c == 0) count.report_error();
  if (c >= limbs.channels) return;
  const DoubleDouble<double> dy = canonical_total(limbs, 0, c);
  results.sums.dy[c] = dy.hi + dy.lo;
  results.sums.dy_xhat[c] = gradient_sum_with_xhat(dy, canonical_total(limbs, 1, c),
                                                   statistics.mean_lo[c], statistics.inv_std[c]);
  use_gradient_sums(results, c);
}

}  // namespace normscope::cuda
