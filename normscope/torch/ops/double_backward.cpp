// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/double_backward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

// The rows of sums(); the formulas are in docs/numerics.md, "Double backward".
enum Row { kDy, kDyXhat, kA, kAXhat, kADy, kBDy, kBDyXhat };

at::Tensor to_float64(const at::Tensor& tensor) {
  return tensor.to(float64_options(tensor).dtype());
}

}  // namespace

DoubleBackward::DoubleBackward(const DoubleBackwardOpArguments& arguments)
    : x_(to_float64(arguments.x)), dy_(to_float64(arguments.dy)) {
  const at::Tensor zeros = at::zeros({x_.size(1)}, x_.options());
  const auto parameter = [&](const OptionalTensor& tensor, const at::Tensor& otherwise) {
    return along_channels(x_, tensor ? to_float64(*tensor) : otherwise);
  };
  a_ = arguments.grad_dx ? to_float64(*arguments.grad_dx) : at::zeros_like(x_);
  b_ = parameter(arguments.grad_dweight, zeros);
  c_ = parameter(arguments.grad_dbias, zeros);
  weight_ = parameter(arguments.weight, at::ones_like(zeros));
  inv_std_ = along_channels(x_, arguments.statistics[2]);
  xhat_ = x_.sub(along_channels(x_, arguments.statistics[0]))
              .sub_(along_channels(x_, arguments.statistics[1]))
              .mul_(inv_std_);
  sums_ = local_sums();
}

// The sums [C] of a tensor [N, C, *].
at::Tensor DoubleBackward::per_channel(const at::Tensor& tensor) const {
  return tensor.transpose(0, 1).flatten(1).sum(1);
}

std::int64_t DoubleBackward::count() const { return elements_per_channel(x_).expect_int(); }

at::Tensor DoubleBackward::local_sums() const {
  const at::Tensor dy = per_channel(dy_);
  const at::Tensor dy_xhat = per_channel(dy_ * xhat_);
  const at::Tensor b = b_.flatten();
  // In the order of Row.
  return at::stack({dy, dy_xhat, per_channel(a_), per_channel(a_ * xhat_), per_channel(a_ * dy_),
                    b * dy, b * dy_xhat});
}

GradientTensors DoubleBackward::gradients(const at::Tensor& means) const {
  const auto mean = [&](Row row) { return along_channels(x_, means[row]); };
  const auto project = [&](const at::Tensor& v, Row of_v, Row of_v_xhat) {
    return v - mean(of_v) - xhat_ * mean(of_v_xhat);
  };
  const at::Tensor p_dy = project(dy_, kDy, kDyXhat);
  const at::Tensor p_a = project(a_, kA, kAXhat);
  const at::Tensor p_b_dy = project(b_ * dy_, kBDy, kBDyXhat);

  const at::Tensor covariance = mean(kADy) - mean(kA) * mean(kDy) - mean(kAXhat) * mean(kDyXhat);
  const at::Tensor scale = weight_ * inv_std_;
  const at::Tensor of_projections = mean(kDyXhat) * p_a + mean(kAXhat) * p_dy + covariance * xhat_;
  return {scale * p_a + b_ * xhat_ + c_, inv_std_ * (p_b_dy - scale * of_projections),
          per_channel(inv_std_ * dy_ * p_a)};
}

}  // namespace normscope::binding
