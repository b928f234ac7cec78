// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "normscope/core/activation_functions.h"
#include "normscope/core/element.h"

namespace normscope::testing {

inline constexpr ActivationFunction kAllActivations[] = {
    {Activation::kRelu},           {Activation::kRelu6},
    {Activation::kLeakyRelu, 0.2}, {Activation::kLeakyRelu, -0.5},
    {Activation::kSilu},           {Activation::kHardSwish},
};

[[nodiscard]] inline std::string name_of_activation(const ActivationFunction& activation) {
  switch (activation.kind) {
    case Activation::kNone: return "none";
    case Activation::kRelu: return "relu";
    case Activation::kRelu6: return "relu6";
    case Activation::kLeakyRelu: return activation.negative_slope < 0.0 ? "falling" : "leaky_relu";
    case Activation::kSilu: return "silu";
    case Activation::kHardSwish: return "hard_swish";
  }
  return "unknown";
}

// Single operations on elements of a dtype, each of which stores its result. They use the formulas
// of core/activation_functions.h, which have their own tests.

[[nodiscard]] inline double activated(DType dtype, const ActivationFunction& activation, double z) {
  return with_element_type(dtype, [&]<class Element>(Element*) {
    using Real = Arithmetic<Element>;
    Element y{};
    with_function<Real>(activation, [&](const auto& function) {
      y = narrow<Element>(Real{function(static_cast<Real>(z))});
    });
    return static_cast<double>(widen(y));
  });
}

[[nodiscard]] inline double activation_gradient(DType dtype, const ActivationFunction& activation,
                                                double z, double dy) {
  return with_element_type(dtype, [&]<class Element>(Element*) {
    using Real = Arithmetic<Element>;
    Element dz{};
    with_function<Real>(activation, [&](const auto& function) {
      dz = narrow<Element>(Real{function.gradient(static_cast<Real>(z), static_cast<Real>(dy))});
    });
    return static_cast<double>(widen(dz));
  });
}

[[nodiscard]] inline double element_sum(DType dtype, double a, double b) {
  return with_element_type(dtype, [&]<class Element>(Element*) {
    using Real = Arithmetic<Element>;
    return static_cast<double>(widen(narrow<Element>(static_cast<Real>(a) + static_cast<Real>(b))));
  });
}

}  // namespace normscope::testing
