// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>

#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "normscope/kernels/kernels.h"

namespace normscope {

// The results of a channel's totals, in all backends: docs/numerics.md, "Finalize".

// view[c], or `otherwise` if the view has no data.
[[nodiscard]] NORMSCOPE_INLINE double channel_value(ChannelView view, std::int64_t c,
                                                    double otherwise) {
  if (view.data == nullptr) return otherwise;
  return with_element_type(view.dtype, [&]<class Element>(Element*) {
    return static_cast<double>(widen(static_cast<const Element*>(view.data)[c]));
  });
}

// Sets view[c] to value, rounded once; does nothing if the view has no data.
NORMSCOPE_INLINE void set_channel_value(MutableChannelView view, std::int64_t c, double value) {
  if (view.data == nullptr) return;
  with_element_type(view.dtype, [&]<class Element>(Element*) {
    static_cast<Element*>(view.data)[c] = round_once<Element>(value);
  });
}

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

// running[c] += momentum * (batch - running[c]), in float64, rounded once into the buffer's type.
NORMSCOPE_INLINE void update_running(MutableChannelView running, std::int64_t c, double batch,
                                     double momentum) {
  const double before = channel_value({running.data, running.dtype}, c, 0.0);
  set_channel_value(running, c, updated_running(before, batch, momentum));
}

// Updates the running statistics of channel c with the moments of a norm batch of n elements.
NORMSCOPE_INLINE void update_running(const RunningUpdate& running, std::int64_t c,
                                     const Moments<double>& moments, double n) {
  if (!(n > 0.0)) return;
  update_running(running.mean, c, moments.mean.hi, running.momentum);
  update_running(running.var, c, moments.population_variance * (n / (n - 1.0)), running.momentum);
}

// Writes the results that follow from the sums of channel c.
NORMSCOPE_INLINE void use_gradient_sums(const GradientResults& results, std::int64_t c) {
  double dy = results.sums.dy[c];
  double dy_xhat = results.sums.dy_xhat[c];
  if (results.all.dy != nullptr) {
    results.all.dy[c] = dy += results.all.dy[c];
    results.all.dy_xhat[c] = dy_xhat += results.all.dy_xhat[c];
  }
  set_channel_value(results.dweight, c, dy_xhat);
  set_channel_value(results.dbias, c, dy);
}

// The coefficients of a channel's formulas: computed in float64, rounded once.
template <class Real>
[[nodiscard]] NORMSCOPE_INLINE Normalize<Real> normalize_coefficients(double mean_hi,
                                                                      double mean_lo,
                                                                      double inv_std, double weight,
                                                                      double bias) {
  return {static_cast<Real>(mean_hi), static_cast<Real>(mean_lo),
          static_cast<Real>(weight * inv_std), static_cast<Real>(bias)};
}

// dy and dy_xhat are sums over the n elements of the norm batch.
template <class Real>
[[nodiscard]] NORMSCOPE_INLINE InputGradient<Real> input_gradient_coefficients(
    double mean_hi, double mean_lo, double inv_std, double weight, double dy, double dy_xhat,
    double n) {
  return {static_cast<Real>(mean_hi), static_cast<Real>(mean_lo),
          static_cast<Real>(weight * inv_std), static_cast<Real>(dy / n),
          static_cast<Real>(inv_std * (dy_xhat / n))};
}

// The same from the results of all channels.
template <class Real>
[[nodiscard]] NORMSCOPE_INLINE Normalize<Real> normalize_coefficients(Statistics statistics,
                                                                      ChannelView weight,
                                                                      ChannelView bias,
                                                                      std::int64_t c) {
  return normalize_coefficients<Real>(statistics.mean_hi[c], statistics.mean_lo[c],
                                      statistics.inv_std[c], channel_value(weight, c, 1.0),
                                      channel_value(bias, c, 0.0));
}
template <class Real>
[[nodiscard]] NORMSCOPE_INLINE InputGradient<Real> input_gradient_coefficients(
    Statistics statistics, ChannelView weight, GradientSums sums, double n, std::int64_t c) {
  return input_gradient_coefficients<Real>(statistics.mean_hi[c], statistics.mean_lo[c],
                                           statistics.inv_std[c], channel_value(weight, c, 1.0),
                                           sums.dy[c], sums.dy_xhat[c], n);
}

}  // namespace normscope
