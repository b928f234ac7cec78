// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "normscope/core/activation.h"
#include "normscope/core/attributes.h"

namespace normscope::binding {

// The activation of y, as an operation of torch.
[[nodiscard]] NORMSCOPE_EXPORT at::Tensor activated(const ActivationFunction& activation,
                                                    const at::Tensor& y);

// dy times the activation's derivative at z, as operations of torch.
[[nodiscard]] at::Tensor activation_gradient(const ActivationFunction& activation,
                                             const at::Tensor& z, const at::Tensor& dy);

}  // namespace normscope::binding
