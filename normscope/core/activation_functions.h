// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "normscope/core/activation.h"
#include "normscope/core/attributes.h"
#include "normscope/core/double_double.h"

namespace normscope {

// The functions use the same operations in the same order as torch's kernels. Those without an
// exponential therefore give the same bits. Value is float, double, or a vector of them. Each has
//   operator()(z): the output
//   gradient(z, dy): dy times the derivative at z

// ReLU and ReLU6. The gradient at NaN is dy; for ReLU6, torch's own loops disagree there.
template <class Value>
struct Clip {
  Value top;  // NaN means no upper bound: every comparison with it is false

  NORMSCOPE_INLINE Value operator()(Value z) const noexcept {
    const Value upper = z > top ? top : z;
    return z <= Value{} ? Value{} : upper;
  }
  NORMSCOPE_INLINE Value gradient(Value z, Value dy) const noexcept {
    return (z <= Value{}) | (z >= top) ? Value{} : dy;
  }
};

template <class Real>
[[nodiscard]] NORMSCOPE_INLINE Clip<Real> clip_of(const ActivationFunction& activation) noexcept {
  return {activation.kind == Activation::kRelu6 ? Real{6} : std::numeric_limits<Real>::quiet_NaN()};
}

template <class Value>
struct LeakyRelu {
  Value slope;  // the slope for negative z

  NORMSCOPE_INLINE Value operator()(Value z) const noexcept { return z > Value{} ? z : z * slope; }
  NORMSCOPE_INLINE Value gradient(Value z, Value dy) const noexcept {
    return z > Value{} ? dy : dy * slope;
  }
};

// z * clamp(z + 3, 0, 6) / 6
template <class Value>
struct HardSwish {
  NORMSCOPE_INLINE Value operator()(Value z) const noexcept {
    const Value six = Value{} + 6;
    Value clamped = z + 3;
    clamped = clamped < Value{} ? Value{} : clamped;
    clamped = clamped > six ? six : clamped;
    return z * clamped / 6;
  }
  NORMSCOPE_INLINE Value gradient(Value z, Value dy) const noexcept {
    const Value three = Value{} + 3;
    const Value half = (Value{} + 1) / 2;
    const Value upper = z < three ? dy * (z / 3 + half) : dy;
    return z <= -three ? Value{} : upper;
  }
};

// Constants of silu and of its e^x for each type of x. kScale keeps 2^-kScale e^x normal for all x
// from -kOne to kLargest.
template <class Real>
struct Exponential;
template <>
struct Exponential<float> {
  using Bits = std::int32_t;
  static constexpr int kFractionBits = 23;
  static constexpr int kBias = 127;
  static constexpr int kScale = 64;
  static constexpr int kDegree = 7;          // of e^r: the remainder is below 2^-27
  static constexpr float kLargest = 110.0F;  // kLargest / e^kLargest rounds to 0
  static constexpr float kOne = 40.0F;       // 1 + e^-kOne rounds to 1
  static constexpr float kToInteger = 0x1.8p23F;
  static constexpr float kLog2E = 0x1.715476p0F;
  static constexpr float kLn2Hi = 0x1.63p-1F;  // k * kLn2Hi is exact
  static constexpr float kLn2Lo = -0x1.bd0106p-13F;
  static constexpr Bits kInverse = 0x7EF311C3;
};
template <>
struct Exponential<double> {
  using Bits = std::int64_t;
  static constexpr int kFractionBits = 52;
  static constexpr int kBias = 1023;
  static constexpr int kScale = 512;
  static constexpr int kDegree = 13;  // of e^r: the remainder is below 2^-57
  static constexpr double kLargest = 760.0;
  static constexpr double kOne = 50.0;
  static constexpr double kToInteger = 0x1.8p52;
  static constexpr double kLog2E = 0x1.71547652b82fep0;
  static constexpr double kLn2Hi = 0x1.62e42feep-1;
  static constexpr double kLn2Lo = 0x1.a39ef35793c76p-33;
  static constexpr Bits kInverse = 0x7FDE623822FC16E6;
};

// The element type of a Value, and the integer type with the same bits.
template <class Value>
struct ValueTraits {
  using Real = Value;
  using Bits = typename Exponential<Real>::Bits;
};
template <class Vector>
  requires requires(Vector vector) { vector[0]; }
struct ValueTraits<Vector> {
  using Real = std::remove_cvref_t<decltype(Vector{}[0])>;
  using Bits = decltype(Vector{} < Vector{});
};

template <class Real>
[[nodiscard]] constexpr Real inverse_factorial(int n) {
  double factorial = 1.0;
  for (int i = 2; i <= n; ++i) factorial *= i;
  return static_cast<Real>(1.0 / factorial);
}

// 2^-kScale e^x for x from -kOne to kLargest, as a pair; NaN stays NaN. With k the integer nearest
// to x / ln 2: e^x = 2^k e^r, and e^r = 1 + r + r^2 times a polynomial. All operations round the
// same on every machine, so every instruction set gives the same bits.
template <class Value>
class ScaledExponential {
 public:
  using Real = typename ValueTraits<Value>::Real;

  static NORMSCOPE_INLINE DoubleDouble<Value> of(Value x) noexcept {
    const Value shifted = x * Constants::kLog2E + Constants::kToInteger;  // low bits: k
    const Value k = shifted - Constants::kToInteger;
    const Value r = (x - k * Constants::kLn2Hi) - k * Constants::kLn2Lo;
    const DoubleDouble<Value> linear = fast_two_sum(Value{} + 1, r);
    const DoubleDouble<Value> power = fast_two_sum(linear.hi, linear.lo + r * r * polynomial<2>(r));
    constexpr typename Constants::Bits kExponent = Constants::kBias - Constants::kScale;
    const auto factor = std::bit_cast<Value>((std::bit_cast<Bits>(shifted) + kExponent)
                                             << Constants::kFractionBits);
    return {power.hi * factor, power.lo * factor};
  }

  // 2^-kScale
  static constexpr Real scale() {
    Real power = 1;
    for (int i = 0; i < Constants::kScale; ++i) power /= 2;
    return power;
  }

 private:
  using Bits = typename ValueTraits<Value>::Bits;
  using Constants = Exponential<Real>;

  // 1 / n! + r / (n + 1)! + r^2 / (n + 2)! + ...
  template <int n>
  static NORMSCOPE_INLINE Value polynomial(Value r) noexcept {
    constexpr Real kFirst = inverse_factorial<Real>(n);
    if constexpr (n == Constants::kDegree) {
      return Value{} + kFirst;
    } else {
      return polynomial<n + 1>(r) * r + kFirst;
    }
  }
};

// z * sigmoid(z) = z / (1 + e^-z)
template <class Value>
struct Silu {
  // Accurate to 2 units in the last place: the quotient is corrected by the rounding error of the
  // denominator. For e^-z below 1 that error is known up to its own rounding.
  NORMSCOPE_INLINE Value operator()(Value z) const noexcept {
    const Value bounded = within_bounds(z);
    const DoubleDouble<Value> e = ScaledExponential<Value>::of(-bounded);
    const DoubleDouble<Value> denominator = fast_two_sum(e.hi, Value{} + kScale);
    const Value lost = (denominator.lo + e.lo) * about_inverse(denominator.hi);
    const Value quotient = bounded / denominator.hi;
    const Value y = (quotient - quotient * lost) * kScale;
    return z > bounded ? z : y;
  }
  NORMSCOPE_INLINE Value gradient(Value z, Value dy) const noexcept {
    const Value bounded = within_bounds(z);
    const Value e = ScaledExponential<Value>::of(-bounded).hi;
    const Value inverse = 1 / (e + kScale);
    return dy * (inverse * kScale) * (1 + bounded * (e * inverse));
  }

 private:
  using Real = typename ValueTraits<Value>::Real;
  static constexpr Real kScale = ScaledExponential<Value>::scale();

  // Below the lower bound y rounds to 0; above the upper bound y rounds to z.
  static NORMSCOPE_INLINE Value within_bounds(Value z) noexcept {
    const Value lower = Value{} - Exponential<Real>::kLargest;
    const Value upper = Value{} + Exponential<Real>::kOne;
    const Value from_below = z < lower ? lower : z;
    return from_below > upper ? upper : from_below;
  }

  // 1 / value, with an error below an eighth: negating the bits as an integer negates the exponent
  // and nearly inverts the fraction.
  static NORMSCOPE_INLINE Value about_inverse(Value value) noexcept {
    using Bits = typename ValueTraits<Value>::Bits;
    return std::bit_cast<Value>(Exponential<Real>::kInverse - std::bit_cast<Bits>(value));
  }
};

// Calls use(function) with the function object for this activation, for scalar values.
template <class Real, class Use>
NORMSCOPE_INLINE void with_function(const ActivationFunction& activation, const Use& use) {
  switch (activation.kind) {
    case Activation::kLeakyRelu:
      use(LeakyRelu<Real>{static_cast<Real>(activation.negative_slope)});
      return;
    case Activation::kSilu: use(Silu<Real>{}); return;
    case Activation::kHardSwish: use(HardSwish<Real>{}); return;
    default: use(clip_of<Real>(activation));
  }
}

// The same for piecewise linear activations.
template <class Real, class Use>
NORMSCOPE_INLINE void with_piecewise_linear(const ActivationFunction& activation, const Use& use) {
  if (activation.kind == Activation::kLeakyRelu) {
    use(LeakyRelu<Real>{static_cast<Real>(activation.negative_slope)});
  } else {
    use(clip_of<Real>(activation));
  }
}

}  // namespace normscope
