// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/activation.h"
#include "normscope/kernels/cuda/apply.cuh"

namespace normscope::cuda {

// What an element becomes with an activation after it, or before its gradient.

// A value as an element holds it: what a sequence of single operations would have stored.
template <class Element>
NORMSCOPE_INLINE Arithmetic<Element> rounded(Arithmetic<Element> value) {
  return widen(narrow<Element>(value));
}

// activation(normalized x + residual)
template <class Element>
struct ActivatedElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = Normalize<Real>;
  static constexpr int kCount = Coefficients::kNormalize;

  Elements<const Element> x;
  Elements<const Element> residual;  // data nullptr: there is none
  ActivationFunction activation;
  const Real* coefficients;  // [slices, kCount, C]

  template <int kPack>
  static NORMSCOPE_INLINE Formula formula(const Pack<Real, kPack> (&of)[kCount], int j) {
    return NormalizeElements<Element>::template formula<kPack>(of, j);
  }

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;
    Pack<Element, kPack> residual;
    bool has_residual;
    const ActivationFunction& activation;

    NORMSCOPE_INLINE Element apply(const Formula& formula, int j) const {
      Real z = rounded<Element>(formula(widen(x.elements[j])));
      if (has_residual) z = rounded<Element>(z + widen(residual.elements[j]));
      with_function<Real>(activation, [&](const auto& function) { z = function(z); });
      return narrow<Element>(z);
    }
  };
  template <int kPack>
  NORMSCOPE_INLINE Inputs<kPack> load(std::int64_t n, std::int64_t c, std::int64_t p) const {
    const bool has_residual = residual.data != nullptr;
    return {load_pack<kPack>(x.at(n, c, p)),
            has_residual ? load_pack<kPack>(residual.at(n, c, p)) : Pack<Element, kPack>{},
            has_residual, activation};
  }
};

// dy * activation'(normalized x)
template <class Element>
struct ActivationGradientElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = Normalize<Real>;
  static constexpr int kCount = Coefficients::kNormalize;

  Elements<const Element> x;
  Elements<const Element> dy;
  ActivationFunction activation;
  const Real* coefficients;  // [slices, kCount, C]

  template <int kPack>
  static NORMSCOPE_INLINE Formula formula(const Pack<Real, kPack> (&of)[kCount], int j) {
    return NormalizeElements<Element>::template formula<kPack>(of, j);
  }

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;
    Pack<Element, kPack> dy;
    const ActivationFunction& activation;

    NORMSCOPE_INLINE Element apply(const Formula& formula, int j) const {
      const Real z = rounded<Element>(formula(widen(x.elements[j])));
      Real dz = widen(dy.elements[j]);
      with_function<Real>(activation, [&](const auto& function) { dz = function.gradient(z, dz); });
      return narrow<Element>(dz);
    }
  };
  template <int kPack>
  NORMSCOPE_INLINE Inputs<kPack> load(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {load_pack<kPack>(x.at(n, c, p)), load_pack<kPack>(dy.at(n, c, p)), activation};
  }
};

// The same from the activation's output.
template <class Element>
struct GradientOfOutputElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  struct Formula {};
  static constexpr int kCount = 0;

  Elements<const Element> x;  // the output
  Elements<const Element> dy;
  ActivationFunction activation;
  const Real* coefficients = nullptr;

  template <int kPack>
  static NORMSCOPE_INLINE Formula formula(const Pack<Real, kPack>*, int) {
    return {};
  }

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> y;
    Pack<Element, kPack> dy;
    const ActivationFunction& activation;

    NORMSCOPE_INLINE Element apply(const Formula& /*formula*/, int j) const {
      Real dz = widen(dy.elements[j]);
      with_piecewise_linear<Real>(activation, [&](const auto& function) {
        dz = function.gradient(widen(y.elements[j]), dz);
      });
      return narrow<Element>(dz);
    }
  };
  template <int kPack>
  NORMSCOPE_INLINE Inputs<kPack> load(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {load_pack<kPack>(x.at(n, c, p)), load_pack<kPack>(dy.at(n, c, p)), activation};
  }
};

}  // namespace normscope::cuda
