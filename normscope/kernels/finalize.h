// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "normscope/core/formulas.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/kernels.h"

namespace normscope {

// The results of a channel's totals, in all backends: docs/numerics.md, "Finalize".

// The total of one channel's limbs, canonical or not.
[[nodiscard]] inline DoubleDouble<double> total_of(LimbsView limbs, int sum, std::int64_t c) {
  double values[kLimbs];
  for (int k = 0; k < kLimbs; ++k) values[k] = limbs.limb(sum, k)[c];
  canonicalize(values);
  return total(values);
}

struct ChannelStatistics {
  double mean_hi;
  double mean_lo;
  double inv_std;
};

// is_float64: whether x is float64.
[[nodiscard]] NORMSCOPE_INLINE ChannelStatistics statistics_of(const Moments<double>& moments,
                                                               double eps, bool is_float64) {
  const DoubleDouble<double> mean = is_float64 ? moments.mean : float32_pair(moments.mean);
  return {mean.hi, mean.lo, 1.0 / std::sqrt(moments.population_variance + eps)};
}

NORMSCOPE_INLINE void set_statistics(MutableStatistics to, std::int64_t c,
                                     const ChannelStatistics& from) {
  to.mean_hi[c] = from.mean_hi;
  to.mean_lo[c] = from.mean_lo;
  to.inv_std[c] = from.inv_std;
}

// Updates the running statistics of channel c with the moments of a norm batch of n elements.
NORMSCOPE_INLINE void update_running(const RunningUpdate& running, std::int64_t c,
                                     const Moments<double>& moments, double n) {
  if (!(n > 0.0)) return;
  update_running(running.mean, c, moments.mean.hi, running.momentum);
  update_running(running.var, c, moments.population_variance * (n / (n - 1.0)), running.momentum);
}

}  // namespace normscope
