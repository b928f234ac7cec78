// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include "normscope/torch/double_backward.h"
#include "normscope/torch/operators.h"

namespace normscope::binding {

// What the ops answer, not filled yet: alike on every device, and on Meta, which has no storage.

// The options of what is computed in float64 beside x.
[[nodiscard]] at::TensorOptions float64_options(const at::Tensor& x);

// Those of the type that x is computed in.
[[nodiscard]] at::TensorOptions arithmetic_options(const at::Tensor& x);

// Coefficients [slices, numbers, C] of formulas of x's arithmetic.
[[nodiscard]] at::Tensor empty_coefficients(const at::Tensor& x, const c10::SymInt& slices,
                                            std::int64_t numbers);

// What backward answers; empty tensors where a gradient is not wanted. A parameter's is float32, or
// float64 for float64 inputs: autograd rounds it to the parameter's own type.
struct Gradients {
  Gradients(const at::Tensor& x, const WantedGradients& wanted);

  [[nodiscard]] GradientTensors tensors() const { return {dx, dweight, dbias}; }

  at::Tensor dx;       // [N, C, *]
  at::Tensor dweight;  // [C]
  at::Tensor dbias;    // [C]
};

[[nodiscard]] SecondGradients empty_second_gradients(const at::Tensor& x);

}  // namespace normscope::binding
