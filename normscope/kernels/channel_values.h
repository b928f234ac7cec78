// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/element.h"
#include "normscope/core/formulas.h"
#include "normscope/kernels/kernels.h"

namespace normscope {

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

// running[c] += momentum * (batch - running[c]), in float64, rounded once into the buffer's type.
NORMSCOPE_INLINE void update_running(MutableChannelView running, std::int64_t c, double batch,
                                     double momentum) {
  const double before = channel_value({running.data, running.dtype}, c, 0.0);
  set_channel_value(running, c, updated_running(before, batch, momentum));
}

}  // namespace normscope
