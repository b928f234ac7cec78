// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// The activation applied to the normalized values; kNone applies none.
enum class Activation { kNone, kRelu, kRelu6, kLeakyRelu, kSilu, kHardSwish };

// An activation and its parameter.
struct ActivationFunction {
  Activation kind = Activation::kNone;
  double negative_slope = 0.01;  // for kLeakyRelu

  // Whether it is the identity on an interval and constant outside it.
  [[nodiscard]] constexpr bool is_clip() const noexcept {
    return kind == Activation::kRelu || kind == Activation::kRelu6;
  }
  // Whether its graph consists of straight lines.
  [[nodiscard]] constexpr bool is_piecewise_linear() const noexcept {
    return is_clip() || kind == Activation::kLeakyRelu;
  }
  // Whether the gradient can be computed from the output instead of the input.
  [[nodiscard]] constexpr bool output_tells_gradient() const noexcept {
    return is_clip() || (kind == Activation::kLeakyRelu && negative_slope >= 0.0);
  }
};

}  // namespace normscope
