// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/pointwise.h"

#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/hardtanh.h>
#include <ATen/ops/hardtanh_backward.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/leaky_relu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/threshold_backward.h>

namespace normscope::binding {

at::Tensor activated(const ActivationFunction& activation, const at::Tensor& y) {
  switch (activation.kind) {
    case Activation::kNone: break;
    case Activation::kRelu: return at::relu(y);
    case Activation::kRelu6: return at::hardtanh(y, 0, 6);
    case Activation::kLeakyRelu: return at::leaky_relu(y, activation.negative_slope);
    case Activation::kSilu: return at::silu(y);
    case Activation::kHardSwish: return at::hardswish(y);
  }
  return y;
}

at::Tensor activation_gradient(const ActivationFunction& activation, const at::Tensor& z,
                               const at::Tensor& dy) {
  switch (activation.kind) {
    case Activation::kRelu6: return at::hardtanh_backward(dy, z, 0, 6);
    case Activation::kLeakyRelu:
      return at::leaky_relu_backward(dy, z, activation.negative_slope, /*self_is_result=*/false);
    case Activation::kHardSwish: return at::hardswish_backward(dy, z);
    case Activation::kSilu: {
      const at::Tensor sigmoid = z.sigmoid();
      return dy * sigmoid * (1 + z * (1 - sigmoid));
    }
    default: return at::threshold_backward(dy, z, 0);
  }
}

}  // namespace normscope::binding
