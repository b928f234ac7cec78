// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/attributes.h"

namespace normscope {

// An unevaluated sum hi + lo of two doubles with |lo| <= ulp(hi) / 2: about 106 bits (Dekker 1971).
// Real is double, or a vector of doubles. Products and sums are rounded separately: a fused
// multiply-add rounds once, and not every instruction set has one. Devices use a fused multiply-add
// only for the error of a product, which is exact either way.
template <class Real>
struct DoubleDouble {
  Real hi;
  Real lo;
};

// a + b exactly (Knuth 1969).
template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> two_sum(Real a, Real b) noexcept {
  const Real sum = a + b;
  const Real b_part = sum - a;
  return {sum, (a - (sum - b_part)) + (b - b_part)};
}

// a + b exactly, for |a| >= |b| or a == 0.
template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> fast_two_sum(Real a, Real b) noexcept {
  const Real sum = a + b;
  return {sum, b - (sum - a)};
}

// The 26 leading bits of a, and the remainder (Veltkamp 1968).
template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> split_in_halves(Real a) noexcept {
  const Real scaled = a * 134217729.0;  // 2^27 + 1
  const Real hi = scaled - (scaled - a);
  return {hi, a - hi};
}

// a * b - product for product = a * b rounded: exact, unless something overflows (from 2^996 on) or
// underflows.
template <class Real>
NORMSCOPE_INLINE Real product_error(Real a, Real b, Real product) noexcept {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, -product);
#else
  const DoubleDouble<Real> x = split_in_halves(a);
  const DoubleDouble<Real> y = split_in_halves(b);
  return ((x.hi * y.hi - product) + x.hi * y.lo + x.lo * y.hi) + x.lo * y.lo;
#endif
}

// The same if the lower half of b is zero, as in every float32.
template <class Real>
NORMSCOPE_INLINE Real narrow_product_error(Real a, Real b, Real product) noexcept {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, -product);
#else
  const DoubleDouble<Real> halves = split_in_halves(a);
  return (halves.hi * b - product) + halves.lo * b;
#endif
}

// a * b exactly, unless it overflows or underflows.
template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> two_product(Real a, Real b) noexcept {
  const Real product = a * b;
  return {product, product_error(a, b, product)};
}

template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> add(DoubleDouble<Real> a, Real b) noexcept {
  const DoubleDouble<Real> sum = two_sum(a.hi, b);
  return fast_two_sum(sum.hi, sum.lo + a.lo);
}

template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> add(DoubleDouble<Real> a, DoubleDouble<Real> b) noexcept {
  const DoubleDouble<Real> high = two_sum(a.hi, b.hi);
  const DoubleDouble<Real> low = two_sum(a.lo, b.lo);
  const DoubleDouble<Real> sum = fast_two_sum(high.hi, high.lo + low.hi);
  return fast_two_sum(sum.hi, sum.lo + low.lo);
}

template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> negate(DoubleDouble<Real> a) noexcept {
  return {-a.hi, -a.lo};
}

template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> multiply(DoubleDouble<Real> a, Real b) noexcept {
  const DoubleDouble<Real> product = two_product(a.hi, b);
  return fast_two_sum(product.hi, product.lo + a.lo * b);
}

template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> multiply(DoubleDouble<Real> a, DoubleDouble<Real> b) noexcept {
  const DoubleDouble<Real> product = two_product(a.hi, b.hi);
  return fast_two_sum(product.hi, product.lo + (a.hi * b.lo + a.lo * b.hi));
}

template <class Real>
NORMSCOPE_INLINE DoubleDouble<Real> divide(DoubleDouble<Real> a, Real b) noexcept {
  const Real quotient = a.hi / b;
  const DoubleDouble<Real> product = two_product(quotient, b);
  const Real remainder = ((a.hi - product.hi) - product.lo) + a.lo;
  return fast_two_sum(quotient, remainder / b);
}

}  // namespace normscope
