// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include "normscope/core/activation.h"
#include "normscope/core/attributes.h"

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

namespace normscope::binding {

// The activation of y, as an operation of torch.
[[nodiscard]] NORMSCOPE_EXPORT at::Tensor activated(const ActivationFunction& activation,
                                                    const at::Tensor& y);

// dy times the activation's derivative at z, as operations of torch.
[[nodiscard]] at::Tensor activation_gradient(const ActivationFunction& activation,
                                             const at::Tensor& z, const at::Tensor& dy);

}  // namespace normscope::binding
