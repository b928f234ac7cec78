// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/double_double.h"
#include "normscope/core/limbs.h"

namespace normscope {

// The per-channel formulas of docs/numerics.md. Real is double or a vector of doubles.

// Sums of x and x^2 over a tile.
template <class Real>
struct TileMoments {
  DoubleDouble<Real> sum;
  DoubleDouble<Real> sum_of_squares;
};

// From the sums around a pivot a, s = sum(x - a) and q = sum((x - a)^2):
//   sum(x) = n a + s        sum(x^2) = (n a + 2 s) a + q
template <class Real>
NORMSCOPE_INLINE TileMoments<Real> moments_about_zero(Real n, Real pivot, Real s, Real q) noexcept {
  const DoubleDouble<Real> base = two_product(n, pivot);
  return {add(base, s), add(multiply(add(base, s + s), pivot), q)};
}

// The same bits in fewer operations, for a pivot that float32 can represent and n below 2^27: n *
// pivot is exact, and the lower half of the pivot is zero.
template <class Real>
NORMSCOPE_INLINE TileMoments<Real> moments_about_narrow_pivot(Real n, Real pivot, Real s,
                                                              Real q) noexcept {
  const Real base = n * pivot;
  const DoubleDouble<Real> twice = two_sum(base, s + s);
  const Real product = twice.hi * pivot;
  const Real rest = narrow_product_error(twice.hi, pivot, product);
  return {two_sum(base, s), add(fast_two_sum(product, rest + twice.lo * pivot), q)};
}

// The total of canonical limbs.
template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> total(const Real (&limbs)[kLimbs]) noexcept {
  DoubleDouble<Real> sum = two_sum(limbs[kLimbs - 2], limbs[kLimbs - 1]);
  for (int k = kLimbs - 3; k >= 0; --k) sum = add(sum, limbs[k]);
  return sum;
}

template <class Real>
struct Moments {
  DoubleDouble<Real> mean;
  Real population_variance;
};

// mean = S1 / n, var = (S2 - S1 * mean) / n, clamped at 0 from below; NaN stays NaN.
template <class Real>
NORMSCOPE_INLINE Moments<Real> moments(DoubleDouble<Real> sum, DoubleDouble<Real> sum_of_squares,
                                       Real n) noexcept {
  const DoubleDouble<Real> mean = divide(sum, n);
  const DoubleDouble<Real> squared_deviations = add(sum_of_squares, negate(multiply(sum, mean)));
  const Real variance = (squared_deviations.hi + squared_deviations.lo) / n;
  return {mean, variance < 0.0 ? variance - variance : variance};
}

// g2 = inv_std * (sum(dy (x - mean_hi)) - mean_lo * sum(dy))
template <class Real>
NORMSCOPE_INLINE Real gradient_sum_with_xhat(DoubleDouble<Real> sum_dy,
                                             DoubleDouble<Real> sum_dy_centered, Real mean_lo,
                                             Real inv_std) noexcept {
  const DoubleDouble<Real> exact = add(sum_dy_centered, negate(multiply(sum_dy, mean_lo)));
  return inv_std * (exact.hi + exact.lo);
}

// running + momentum * (batch - running)
template <class Real>
NORMSCOPE_INLINE Real updated_running(Real running, Real batch, double momentum) noexcept {
  return running + (batch - running) * momentum;
}

// A mean as two float32 numbers, to be subtracted one after the other in float32 arithmetic.
NORMSCOPE_INLINE DoubleDouble<double> float32_pair(DoubleDouble<double> mean) noexcept {
  const double hi = static_cast<double>(static_cast<float>(mean.hi));
  return {hi, static_cast<double>(static_cast<float>((mean.hi - hi) + mean.lo))};
}

// y = (x - mean) * scale + bias with scale = weight * inv_std. The mean is subtracted first, in two
// parts: x * scale + (bias - mean * scale) would cancel. Value is float, double, or a vector of
// them.
template <class Value>
struct Normalize {
  Value mean_hi;
  Value mean_lo;
  Value scale;
  Value bias;

  NORMSCOPE_INLINE Value operator()(Value x) const noexcept {
    return ((x - mean_hi) - mean_lo) * scale + bias;
  }
};

// dx = scale * (dy - g1 / n - (x - mean) * slope) with slope = inv_std * g2 / n.
template <class Value>
struct InputGradient {
  Value mean_hi;
  Value mean_lo;
  Value scale;
  Value mean_dy;
  Value slope;

  NORMSCOPE_INLINE Value operator()(Value x, Value dy) const noexcept {
    return ((dy - mean_dy) - ((x - mean_hi) - mean_lo) * slope) * scale;
  }
};

// InputGradient together with the formula of y, for a dy that is the gradient of activation(y).
template <class Value>
struct ActivatedInputGradient {
  InputGradient<Value> input_gradient;
  Value bias;

  [[nodiscard]] NORMSCOPE_INLINE Normalize<Value> normalize() const noexcept {
    return {input_gradient.mean_hi, input_gradient.mean_lo, input_gradient.scale, bias};
  }
};

}  // namespace normscope
