// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <tuple>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "normscope/kernels/device_kernels.h"
#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding::meta {
namespace {

// slice_count() for symbolic numbers.
c10::SymInt symbolic_slice_count(const c10::SymInt& samples, std::int64_t wanted) {
  if (wanted == 1) return 1;
  const c10::SymInt slice_size = ((samples - 1) / wanted + 1).max(1);
  return ((samples - 1) / slice_size + 1).max(1);
}

// Also checks the arguments of the op.
c10::SymInt slices_of(const ForwardOpArguments& op) {
  const std::int64_t wanted = checked(op, parsed_scope(op.call.scope)).slices_wanted;
  return symbolic_slice_count(op.x.sym_size(0), wanted);
}

at::Tensor empty_statistics(const at::Tensor& x, const c10::SymInt& slices) {
  return at::empty_symint({slices, 3, x.sym_size(1)}, x.options().dtype(at::kDouble));
}

ForwardTensors forward(const ForwardOpArguments& op) {
  const c10::SymInt slices = slices_of(op);
  static_cast<void>(checked(op.activation, op.x));
  return {empty_output(op.x), empty_statistics(op.x, slices), {}, {}};
}

StatisticsTensors statistics(const ForwardOpArguments& op) {
  const c10::SymInt slices = slices_of(op);
  const auto [mean, var, updates] = op.running.all();
  return {
      empty_statistics(op.x, slices), empty_coefficients(op.x, slices, Coefficients::kNormalize),
      like_or_empty(*mean, op.x),     like_or_empty(*var, op.x),
      like_or_empty(*updates, op.x),  like_or_empty(op.accumulated, op.x)};
}

BackwardTensors backward(const BackwardOpArguments& op) {
  static_cast<void>(parsed_scope(op.call.scope));
  static_cast<void>(checked(op));
  const auto [dx, dweight, dbias] = Gradients(op.x, op.wanted).tensors();
  return {dx, dweight, dbias, op.activation.y ? empty_output(op.x) : at::Tensor()};
}

GradientTensors gradient_sums(const BackwardOpArguments& op) {
  static_cast<void>(parsed_scope(op.call.scope));
  static_cast<void>(checked(op));
  const Gradients gradients(op.x, {false, op.wanted.dweight, op.wanted.dbias});
  return {empty_coefficients(op.x, op.statistics.sym_size(0), Coefficients::kInputGradient),
          gradients.dweight, gradients.dbias};
}

GradientTensors double_backward(const DoubleBackwardOpArguments& op) {
  static_cast<void>(parsed_scope(op.call.scope));
  check_arguments(op);
  return empty_second_gradients(op.x);
}

at::Tensor with_statistics(const WithStatisticsOpArguments& op) {
  check_arguments(op);
  return empty_output(op.x);
}

}  // namespace

TORCH_LIBRARY_IMPL(normscope, Meta, m) {
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_statistics", &Taken<StatisticsOp, &statistics>::call);
  m.impl("batch_norm_gradient_sums", &Taken<GradientSumsOp, &gradient_sums>::call);
  m.impl("batch_norm_double_backward", &Taken<DoubleBackwardOp, &double_backward>::call);
  m.impl("batch_norm_with_statistics", &Taken<WithStatisticsOp, &with_statistics>::call);
}

}  // namespace normscope::binding::meta
