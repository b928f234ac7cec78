// SPDX-License-Identifier: Apache-2.0
#include <string_view>
#include <tuple>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "normscope/torch/arguments.h"
#include "normscope/torch/operators.h"
#include "normscope/torch/results.h"
#include "normscope/torch/tensor_view.h"

namespace normscope::binding {
namespace {

using GradientTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// slice_count() of symbolic numbers.
c10::SymInt symbolic_slice_count(const c10::SymInt& samples, std::int64_t wanted) {
  if (wanted == 1) return 1;
  const c10::SymInt slice_size = ((samples - 1) / wanted + 1).max(1);
  return ((samples - 1) / slice_size + 1).max(1);
}

std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, std::optional<double> momentum, double eps,
    at::IntArrayRef dims, std::string_view scope, std::string_view slice_stats, bool,
    std::string_view, std::string_view) {
  check_arguments({x, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps,
                   dims, scope, slice_stats});
  const c10::SymInt slices = symbolic_slice_count(x.sym_size(0), slices_wanted(scope));
  return {empty_output(x), at::empty_symint({slices, 3, x.sym_size(1)}, wide(x))};
}

GradientTensors backward(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                         const at::Tensor& statistics, bool wants_dx, bool wants_dweight,
                         bool wants_dbias, std::string_view scope, std::string_view,
                         std::string_view) {
  check_arguments({dy, x, weight, statistics, scope});
  return Gradients(x, {.dx = wants_dx, .dweight = wants_dweight, .dbias = wants_dbias}).tensors();
}

GradientTensors double_backward(const OptionalTensor& grad_dx, const OptionalTensor& grad_dweight,
                                const OptionalTensor& grad_dbias, const at::Tensor& dy,
                                const at::Tensor& x, const OptionalTensor& weight,
                                const at::Tensor& statistics, std::string_view scope,
                                std::string_view, std::string_view) {
  check_arguments({grad_dx, grad_dweight, grad_dbias, {dy, x, weight, statistics, scope}});
  const SecondGradients gradients = empty_second_gradients(x);
  return {gradients.dy, gradients.x, gradients.weight};
}

at::Tensor apply(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                 const at::Tensor& statistics) {
  check_arguments({x, weight, bias, statistics});
  return empty_output(x);
}

}  // namespace

TORCH_LIBRARY_IMPL(normscope, Meta, m) {
  m.impl("batch_norm_forward", &forward);
  m.impl("batch_norm_backward", &backward);
  m.impl("batch_norm_double_backward", &double_backward);
  m.impl("batch_norm_apply", &apply);
}

}  // namespace normscope::binding
