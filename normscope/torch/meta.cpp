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
  const c10::SymInt slice_size = ((samples + wanted - 1) / wanted).max(1);
  return ((samples + slice_size - 1) / slice_size).max(1);
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

GradientTensors backward(const at::Tensor&, const at::Tensor& x, const OptionalTensor&,
                         const at::Tensor&, bool wants_dx, bool wants_dweight, bool wants_dbias,
                         std::string_view, std::string_view, std::string_view) {
  return Gradients(x, {.dx = wants_dx, .dweight = wants_dweight, .dbias = wants_dbias}).tensors();
}

GradientTensors double_backward(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                const at::Tensor&, const at::Tensor& x, const OptionalTensor&,
                                const at::Tensor&, std::string_view, std::string_view,
                                std::string_view) {
  const auto [dy, dx, dweight] = empty_second_gradients(x);
  return {dy, dx, dweight};
}

at::Tensor apply(const at::Tensor& x, const OptionalTensor&, const OptionalTensor&,
                 const at::Tensor&) {
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
