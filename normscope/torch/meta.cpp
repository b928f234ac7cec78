// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <tuple>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "normscope/torch/arguments.h"
#include "normscope/torch/operators.h"
#include "normscope/torch/results.h"
#include "normscope/torch/tensor_view.h"

namespace normscope::binding {
namespace {

// slice_count() of symbolic numbers.
c10::SymInt symbolic_slice_count(const c10::SymInt& samples, std::int64_t wanted) {
  if (wanted == 1) return 1;
  const c10::SymInt slice_size = ((samples - 1) / wanted + 1).max(1);
  return ((samples - 1) / slice_size + 1).max(1);
}

std::tuple<at::Tensor, at::Tensor> forward(const ForwardOpArguments& op) {
  const std::int64_t wanted = checked(op, parsed_scope(op.call.scope)).slices_wanted;
  const c10::SymInt slices = symbolic_slice_count(op.x.sym_size(0), wanted);
  return {empty_output(op.x),
          at::empty_symint({slices, 3, op.x.sym_size(1)}, float64_options(op.x))};
}

GradientTensors backward(const BackwardOpArguments& op) {
  static_cast<void>(parsed_scope(op.call.scope));
  check_arguments(op);
  return Gradients(op.x, op.wanted).tensors();
}

GradientTensors double_backward(const DoubleBackwardOpArguments& op) {
  static_cast<void>(parsed_scope(op.call.scope));
  check_arguments(op);
  const SecondGradients gradients = empty_second_gradients(op.x);
  return {gradients.dy, gradients.x, gradients.weight};
}

at::Tensor with_statistics(const WithStatisticsOpArguments& op) {
  check_arguments(op);
  return empty_output(op.x);
}

}  // namespace

TORCH_LIBRARY_IMPL(normscope, Meta, m) {
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_double_backward", &Taken<DoubleBackwardOp, &double_backward>::call);
  m.impl("batch_norm_with_statistics", &Taken<WithStatisticsOp, &with_statistics>::call);
}

}  // namespace normscope::binding
