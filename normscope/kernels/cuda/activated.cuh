// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/activation_functions.h"
#include "normscope/kernels/cuda/apply.cuh"

namespace normscope::cuda {

// How elements are computed if an activation follows, in forward and in backward.

// Rounds a value to Element, as a sequence of single operations would store it.
template <class Element>
NORMSCOPE_INLINE Arithmetic<Element> rounded(Arithmetic<Element> value) {
  return widen(narrow<Element>(value));
}

// An activation with its parameter rounded to Real.
template <class Real>
struct DeviceActivation {
  Activation kind;
  Real negative_slope;

  // Calls use(function) with its function object. Called once per pack: nothing is looked up
  // inside.
  template <class Use>
  NORMSCOPE_INLINE void with_function(const Use& use) const {
    switch (kind) {
      case Activation::kSilu: use(Silu<Real>{}); return;
      case Activation::kHardSwish: use(HardSwish<Real>{}); return;
      default: with_piecewise_linear(use);
    }
  }
  template <class Use>
  NORMSCOPE_INLINE void with_piecewise_linear(const Use& use) const {
    if (kind == Activation::kLeakyRelu) {
      use(LeakyRelu<Real>{negative_slope});
    } else {
      use(clip_of<Real>({kind, 0.0}));
    }
  }
};

template <class Real>
[[nodiscard]] DeviceActivation<Real> rounded_once(const ActivationFunction& activation) {
  return {activation.kind, static_cast<Real>(activation.negative_slope)};
}

// activation(normalized x + residual)
template <class Element>
struct ActivatedElements {
  using ElementType = Element;
  using Real = Arithmetic<Element>;
  using Formula = Normalize<Real>;
  static constexpr int kCount = Coefficients::kNormalize;

  Elements<const Element> x;
  Elements<const Element> residual;  // data nullptr: none
  DeviceActivation<Real> activation;
  const Real* coefficients;  // [slices, kCount, C]

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;
    Pack<Element, kPack> residual;
    bool has_residual;
    const DeviceActivation<Real>& activation;

    template <class FormulaOf>
    NORMSCOPE_INLINE Pack<Element, kPack> apply(const FormulaOf& formula_of) const {
      Pack<Element, kPack> y;
      activation.with_function([&](const auto& function) {
        y = pack_of<Element, kPack>([&](int j) {
          Real z = rounded<Element>(formula_of(j)(widen(x.elements[j])));
          if (has_residual) z = rounded<Element>(z + widen(residual.elements[j]));
          return narrow<Element>(function(z));
        });
      });
      return y;
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
  DeviceActivation<Real> activation;
  const Real* coefficients;  // [slices, kCount, C]

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> x;
    Pack<Element, kPack> dy;
    const DeviceActivation<Real>& activation;

    template <class FormulaOf>
    NORMSCOPE_INLINE Pack<Element, kPack> apply(const FormulaOf& formula_of) const {
      Pack<Element, kPack> dz;
      activation.with_function([&](const auto& function) {
        dz = pack_of<Element, kPack>([&](int j) {
          const Real z = rounded<Element>(formula_of(j)(widen(x.elements[j])));
          return narrow<Element>(function.gradient(z, widen(dy.elements[j])));
        });
      });
      return dz;
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
  DeviceActivation<Real> activation;
  const Real* coefficients = nullptr;

  template <int kPack>
  struct Inputs {
    Pack<Element, kPack> y;
    Pack<Element, kPack> dy;
    const DeviceActivation<Real>& activation;

    template <class FormulaOf>
    NORMSCOPE_INLINE Pack<Element, kPack> apply(const FormulaOf& /*formula_of*/) const {
      Pack<Element, kPack> dz;
      activation.with_piecewise_linear([&](const auto& function) {
        dz = pack_of<Element, kPack>([&](int j) {
          return narrow<Element>(function.gradient(widen(y.elements[j]), widen(dy.elements[j])));
        });
      });
      return dz;
    }
  };
  template <int kPack>
  NORMSCOPE_INLINE Inputs<kPack> load(std::int64_t n, std::int64_t c, std::int64_t p) const {
    return {load_pack<kPack>(x.at(n, c, p)), load_pack<kPack>(dy.at(n, c, p)), activation};
  }
};

}  // namespace normscope::cuda
