// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "normscope/core/cache_lines.h"
#include "normscope/kernels/channel_values.h"
#include "normscope/kernels/cpu/target.h"
#include "normscope/kernels/kernels.h"

namespace normscope::cpu {

// `count` numbers, rounded up to whole cache lines.
template <class Number>
inline std::int64_t whole_lines(std::int64_t count) {
  const std::size_t bytes = whole_cache_lines(static_cast<std::size_t>(count) * sizeof(Number));
  return static_cast<std::int64_t>(bytes / sizeof(Number));
}

// Several arrays [C], each starting at a cache line. A full vector can be read from any channel,
// even past the last one.
template <class Real>
class ChannelArrays {
 public:
  ChannelArrays(int arrays, std::int64_t channels)
      : stride_(whole_lines<Real>(channels)),
        values_(static_cast<std::size_t>(arrays * stride_ + kCacheLine)) {}

  [[nodiscard]] Real* operator[](int array) { return values_.data() + array * stride_; }

 private:
  std::int64_t stride_;  // between arrays
  AlignedVector<Real> values_;
};

// The coefficients of the formula of y (or dx) for every channel.
template <class Real>
class NormalizeFormulas {
 public:
  NormalizeFormulas(std::int64_t channels, Statistics statistics, ChannelView weight,
                    ChannelView bias)
      : arrays_(4, channels), formulas_{arrays_[0], arrays_[1], arrays_[2], arrays_[3]} {
    for (std::int64_t c = 0; c < channels; ++c) {
      formulas_.set(c, normalize_coefficients<Real>(
                           statistics.mean_hi[c], statistics.mean_lo[c], statistics.inv_std[c],
                           channel_value(weight, c, 1.0), channel_value(bias, c, 0.0)));
    }
  }

  // The formulas of the channels from c on.
  [[nodiscard]] NormalizeArrays<const Real> from(std::int64_t c) const { return formulas_.from(c); }

 private:
  ChannelArrays<Real> arrays_;
  NormalizeArrays<Real> formulas_;
};

template <class Real>
class InputGradientFormulas {
 public:
  // sums: over the `count` elements of the norm batch.
  InputGradientFormulas(std::int64_t channels, Statistics statistics, ChannelView weight,
                        GradientSums sums, double count)
      : arrays_(5, channels),
        formulas_{arrays_[0], arrays_[1], arrays_[2], arrays_[3], arrays_[4]} {
    for (std::int64_t c = 0; c < channels; ++c) {
      formulas_.set(c, input_gradient_coefficients<Real>(
                           statistics.mean_hi[c], statistics.mean_lo[c], statistics.inv_std[c],
                           channel_value(weight, c, 1.0), sums.dy[c], sums.dy_xhat[c], count));
    }
  }

  [[nodiscard]] InputGradientArrays<const Real> from(std::int64_t c) const {
    return formulas_.from(c);
  }

 private:
  ChannelArrays<Real> arrays_;
  InputGradientArrays<Real> formulas_;
};

}  // namespace normscope::cpu
