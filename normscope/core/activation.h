// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// What is applied to normalized elements; kNone: nothing.
enum class Activation { kNone, kRelu, kRelu6, kLeakyRelu, kSilu, kHardSwish };

// An activation and its parameter.
struct ActivationFunction {
  Activation kind = Activation::kNone;
  double negative_slope = 0.01;  // of kLeakyRelu

  // Whether it leaves an interval as it is, and is constant beyond it.
  [[nodiscard]] constexpr bool is_clip() const noexcept {
    return kind == Activation::kRelu || kind == Activation::kRelu6;
  }
  // Whether it is made of straight lines.
  [[nodiscard]] constexpr bool is_piecewise_linear() const noexcept {
    return is_clip() || kind == Activation::kLeakyRelu;
  }
  // Whether it has at an output's input the gradient that it has at the output itself.
  [[nodiscard]] constexpr bool output_tells_gradient() const noexcept {
    return is_clip() || (kind == Activation::kLeakyRelu && negative_slope >= 0.0);
  }
};

}  // namespace normscope
