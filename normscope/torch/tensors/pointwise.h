// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

// The formulas of core/formulas.h as operations of torch, the same ones in the same order: for
// graphs, whose compiler fuses them with those before and after, and for torch's kernels. x and dy
// are in the type of the arithmetic, and all other values have a shape that broadcasts over them.
namespace normscope::binding::pointwise {

// x - mean. The second summand of the mean is what the first cannot represent.
[[nodiscard]] inline at::Tensor centered(const at::Tensor& x, const at::Tensor& mean,
                                         const at::Tensor& rest_of_mean) {
  return (x - mean) - rest_of_mean;
}

// y.
[[nodiscard]] inline at::Tensor normalized(const at::Tensor& centered, const at::Tensor& scale,
                                           const at::Tensor& shift) {
  return centered * scale + shift;
}

// dx. `slope` is inv_std^2 times the mean of dy * (x - mean).
[[nodiscard]] inline at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& centered,
                                               const at::Tensor& mean_dy, const at::Tensor& slope,
                                               const at::Tensor& scale) {
  return ((dy - mean_dy) - centered * slope) * scale;
}

}  // namespace normscope::binding::pointwise
