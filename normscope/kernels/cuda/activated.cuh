// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/activation_functions.h"
#include "normscope/kernels/cuda/apply.cuh"

namespace normscope::cuda {

// How elements are computed if an activation follows, in forward and in backward. Function is one
// of core/activation_functions.h: a kernel for each, so that no loop chooses among them.

// Rounds a value to Element, as a sequence of single operations would store it.
template <class Element>
NORMSCOPE_INLINE Arithmetic<Element> rounded(Arithmetic<Element> value) {
#if defined(__CUDA_ARCH__)
  // The bits above 16 zeros are those of the float32.
  if constexpr (std::is_same_v<Element, BFloat16>) {
    return std::bit_cast<float>(narrow_pair<BFloat16>(0.0F, value));
  }
#endif
  return widen(narrow<Element>(value));
}

// Whether an activation divides, which is many instructions.
template <class Function>
inline constexpr bool kDivides = false;
template <class Real>
inline constexpr bool kDivides<Silu<Real>> = true;
template <class Real>
inline constexpr bool kDivides<HardSwish<Real>> = true;

// activation(normalized x + residual)
// Loop: at most 150 instructions per store, 290 with HardSwish, 580 with Silu; at least 4 loads; at
// least 4 before the wait.
template <class Element, class Function, bool kHasResidual>
struct ActivatedElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = Normalize<Real>;
  static constexpr int kCount = Coefficients::kNormalize;
  static constexpr int kInputs = kHasResidual ? 2 : 1;
  static constexpr int kAtOnce = 4 / kInputs;
  static constexpr bool kIsLong = kDivides<Function>;

  Elements<const Element> inputs[kInputs];  // x, residual
  const Real* coefficients;                 // [slices, kCount, C]
  Function function;

  NORMSCOPE_INLINE Real output(const Formula& formula, const Real (&in)[kInputs]) const {
    Real z = rounded<Element>(formula(in[0]));
    if constexpr (kHasResidual) z = rounded<Element>(z + in[1]);
    return function(z);
  }
};

// dy * activation'(normalized x)
// Loop: at most 150 instructions per store, 290 with HardSwish, 510 with Silu; at least 4 loads; at
// least 4 before the wait.
template <class Element, class Function>
struct ActivationGradientElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = Normalize<Real>;
  static constexpr int kCount = Coefficients::kNormalize;
  static constexpr int kInputs = 2;
  static constexpr int kAtOnce = 2;
  static constexpr bool kIsLong = kDivides<Function>;

  Elements<const Element> inputs[kInputs];  // x, dy
  const Real* coefficients;                 // [slices, kCount, C]
  Function function;

  NORMSCOPE_INLINE Real output(const Formula& formula, const Real (&in)[kInputs]) const {
    return function.gradient(rounded<Element>(formula(in[0])), in[1]);
  }
};

// The same from the activation's output.
// Loop: at most 150 instructions per store; at least 4 loads.
template <class Element, class Function>
struct GradientOfOutputElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  struct Formula {};
  static constexpr int kCount = 0;
  static constexpr int kInputs = 2;
  static constexpr int kAtOnce = 2;
  static constexpr bool kIsLong = false;

  Elements<const Element> inputs[kInputs];  // the output, dy
  const Real* coefficients;                 // none
  Function function;

  NORMSCOPE_INLINE Real output(const Formula& /*formula*/, const Real (&in)[kInputs]) const {
    return function.gradient(in[0], in[1]);
  }
};

}  // namespace normscope::cuda
