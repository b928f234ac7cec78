// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/backends.h"

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/calls/finite.h"
#include "normscope/torch/calls/recomputation.h"
#include "normscope/torch/calls/run_with_exchange.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/ops/all_devices.h"
#include "normscope/torch/ops/autograd.h"
#include "normscope/torch/ops/buffers.h"
#include "normscope/torch/ops/call_site.h"
#include "normscope/torch/ops/graph.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/tensors/device.h"
#include "normscope/torch/tensors/kernels_in_use.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding::backend {
namespace {

// The tensors of one forward; the arguments point to their storage.
struct PreparedForward {
  at::Tensor x;
  at::Tensor residual;  // if there is one
  OptionalTensor weight;
  OptionalTensor bias;
  at::Tensor statistics;
  at::Tensor y;  // or coefficients
  at::Tensor coefficients;
  ForwardArguments arguments;
};

// The result of an op: the output of a formula, or its coefficients.
enum class Answer { kOutput, kCoefficients };

PreparedForward prepare_forward(const ForwardOpArguments& op, Answer answer, const Scope& scope,
                                CallSite& site) {
  const Slicing slicing = checked(op, scope);
  const ActivationFunction function = checked(op.activation, op.x);
  const std::int64_t slices = slice_count(op.x.size(0), slicing.slices_wanted);
  site.prepare(op.x, slices);
  PreparedForward prepared;
  prepared.x = in_layout_of_output(op.x);
  if (answer == Answer::kOutput) {
    prepared.y = empty_output(op.x);
    prepared.arguments.y = mutable_view(prepared.y);
    prepared.arguments.activation = function;
    if (op.activation.residual) {
      prepared.residual = in_layout_of(prepared.y, *op.activation.residual);
      prepared.arguments.residual = view(prepared.residual);
    }
  } else {
    prepared.coefficients = empty_coefficients(op.x, slices, Coefficients::kNormalize);
    prepared.arguments.coefficients = {prepared.coefficients.mutable_data_ptr()};
  }
  prepared.weight = contiguous(op.weight);
  prepared.bias = contiguous(op.bias);
  prepared.statistics = at::empty({slices, 3, op.x.size(1)}, op.x.options().dtype(at::kDouble));

  ForwardArguments& arguments = prepared.arguments;
  arguments.x = view(prepared.x);
  arguments.weight = channel_view(prepared.weight);
  arguments.bias = channel_view(prepared.bias);
  arguments.running.momentum = op.momentum.value_or(kCumulativeAverage);
  if (!batch_was_counted()) {
    update_running(op.running, op.momentum, arguments);
    if (op.accumulated) {
      arguments.accumulated = {op.accumulated->mutable_data_ptr<double>(), op.x.size(1)};
    }
  }
  arguments.eps = op.eps;
  arguments.slices = slices;
  arguments.slice_stats = slicing.slice_stats;
  arguments.backward =
      op.needs_backward.value_or(false) ? BackwardNeeded::kYes : BackwardNeeded::kNo;
  arguments.statistics = prepared.statistics.mutable_data_ptr<double>();
  return prepared;
}

PreparedForward run_forward(const ForwardOpArguments& op, Answer answer) {
  CallSite site(op.x);
  const auto run = [&](const ExchangeUse& exchange) {
    const WritableBuffers buffers(op.running);
    PreparedForward prepared = prepare_forward(
        op.with(op.weight, buffers.tensors(), op.accumulated), answer, exchange.scope(), site);
    check_finite(op.x, exchange.get(), Direction::kForward, op.call);
    batch_norm_forward(prepared.arguments, site.with(exchange, op.call));
    if (!batch_was_counted()) buffers.write_back();
    return prepared;
  };
  return run_with_exchange(op.x, Direction::kForward, op.call, site.placement(), run);
}

// Updates the buffers of `op`.
GraphStatistics graph_statistics(const ForwardOpArguments& op) {
  if (uses_torch_kernels(op.x)) return portable_statistics(op);
  PreparedForward done = run_forward(op, Answer::kCoefficients);
  return {std::move(done.statistics), std::move(done.coefficients)};
}

StatisticsTensors statistics(const ForwardOpArguments& op) {
  note_forward_in_graph(op.call.layer);
  const auto [given_mean, given_var, given_updates] = op.running.all();
  const OptionalTensor mean = copy_of(*given_mean);
  const OptionalTensor var = copy_of(*given_var);
  const OptionalTensor updates = copy_of(*given_updates);
  const OptionalTensor accumulated = copy_of(op.accumulated);
  const GraphStatistics done =
      graph_statistics(op.with(op.weight, {mean, var, updates}, accumulated));
  return {done.statistics,     done.coefficients,       or_empty(mean, op.x),
          or_empty(var, op.x), or_empty(updates, op.x), or_empty(accumulated, op.x)};
}

// The tensors of one backward; the arguments point to their storage.
struct PreparedBackward {
  at::Tensor x;
  at::Tensor dy;
  OptionalTensor weight;
  Gradients gradients;
  at::Tensor coefficients;
  BackwardArguments arguments;
  // Only with an activation.
  OptionalTensor bias;
  at::Tensor y;
  at::Tensor dz;
};

// Sets up the memory and the arguments of the activation in a backward.
void prepare_activation(const BackwardOpArguments& op, const ActivationFunction& function,
                        PreparedBackward& prepared) {
  BackwardArguments& arguments = prepared.arguments;
  arguments.activation = function;
  prepared.bias = contiguous(op.activation.bias);
  arguments.bias = channel_view(prepared.bias);
  const OptionalTensor& y = op.activation.y;
  if (y) {
    prepared.y = in_layout_of(prepared.x, *y);
    arguments.y = view(prepared.y);
  }
  const bool is_on_device = placement_of(op.x).memory == Memory::kDevice;
  if (needs_dz(function, y.has_value(), is_on_device)) {
    prepared.dz = empty_output(op.x);
    arguments.dz = mutable_view(prepared.dz);
  }
}

PreparedBackward prepare_backward(const BackwardOpArguments& op, Answer answer, CallSite& site) {
  const ActivationFunction function = checked(op);
  const std::int64_t slices = op.statistics.size(0);
  site.prepare(op.x, slices);
  const bool wants_dx = op.wanted.dx && answer == Answer::kOutput;
  PreparedBackward prepared;
  prepared.weight = contiguous(op.weight);
  prepared.gradients = {op.x, {wants_dx, op.wanted.dweight, op.wanted.dbias}};
  const Gradients& gradients = prepared.gradients;
  BackwardArguments& arguments = prepared.arguments;
  prepared.x = in_layout_of_output(op.x);
  if (wants_dx) arguments.dx = mutable_view(gradients.dx);
  if (answer == Answer::kCoefficients) {
    prepared.coefficients = empty_coefficients(op.x, slices, Coefficients::kInputGradient);
    arguments.coefficients = {prepared.coefficients.mutable_data_ptr()};
  }
  prepared.dy = in_layout_of(prepared.x, op.dy);
  arguments.x = view(prepared.x);
  arguments.dy = view(prepared.dy);
  arguments.weight = channel_view(prepared.weight);
  arguments.statistics = op.statistics.const_data_ptr<double>();
  arguments.slices = slices;
  if (op.wanted.dweight) arguments.dweight = mutable_channel_view(gradients.dweight);
  if (op.wanted.dbias) arguments.dbias = mutable_channel_view(gradients.dbias);
  if (function.kind != Activation::kNone) prepare_activation(op, function, prepared);
  return prepared;
}

PreparedBackward run_backward(const BackwardOpArguments& op, Answer answer) {
  CallSite site(op.x);
  const auto run = [&](const ExchangeUse& exchange) {
    PreparedBackward prepared = prepare_backward(op, answer, site);
    check_finite(op.dy, exchange.get(), Direction::kBackward, op.call);
    batch_norm_backward(prepared.arguments, site.with(exchange, op.call));
    return prepared;
  };
  return run_with_exchange(op.x, Direction::kBackward, op.call, site.placement(), run);
}

GradientTensors gradient_sums(const BackwardOpArguments& op) {
  if (uses_torch_kernels(op.x)) return portable_gradient_sums(op);
  const PreparedBackward done = run_backward(op, Answer::kCoefficients);
  return {done.coefficients, done.gradients.dweight, done.gradients.dbias};
}

at::Tensor with_statistics(const WithStatisticsOpArguments& op) {
  if (uses_torch_kernels(op.x)) return portable_with_statistics(op);
  check_arguments(op);
  CallSite site(op.x);
  site.prepare(op.x, op.statistics.size(0));
  const at::Tensor y = empty_output(op.x);
  const at::Tensor x = in_layout_of(y, op.x);
  const OptionalTensor weight = contiguous(op.weight);
  const OptionalTensor bias = contiguous(op.bias);
  const OptionalTensor& residual = op.activation.residual;
  const at::Tensor added = residual ? in_layout_of(y, *residual) : at::Tensor();
  batch_norm_with_statistics({.x = view(x),
                              .y = mutable_view(y),
                              .weight = channel_view(weight),
                              .bias = channel_view(bias),
                              .statistics = op.statistics.const_data_ptr<double>(),
                              .slices = op.statistics.size(0),
                              .activation = checked(op.activation, op.x),
                              .residual = added.defined() ? view(added) : TensorView{}},
                             site.alone());
  return y;
}

// Nothing else does below autograd. They show that the layer has written, and what others write.
void bump_versions(const ForwardOpArguments& op) {
  if (batch_was_counted()) return;
  for (const OptionalTensor* buffer : op.running.all()) bump_version(*buffer);
  bump_version(op.accumulated);
}

}  // namespace

ForwardTensors forward(const ForwardOpArguments& op) {
  if (op.graph) note_forward_in_graph(op.call.layer);
  if (uses_torch_kernels(op.x)) {
    const bool has_ending = op.activation.residual || op.activation.activates();
    if (has_ending || is_of_one_rank(parsed_scope(op.call.scope), op.call)) {
      return autograd::forward_by_torchs_kernels(op);
    }
    ForwardTensors done = portable_forward(op);
    bump_versions(op);
    return done;
  }
  const PreparedForward done = run_forward(op, Answer::kOutput);
  bump_versions(op);
  return {done.y, done.statistics, {}, {}};
}

BackwardTensors backward(const BackwardOpArguments& op) {
  // Torch's kernels leave activations to torch: a backward with one is of another forward.
  if (uses_torch_kernels(op.x) && !op.activation.activates()) {
    if (op.spread) return portable_backward(op);
    BackwardTensors done = backward_by_coefficients(op, portable_gradient_sums(op));
    at::Tensor& dx = std::get<0>(done);
    if (op.wanted.dx) dx = in_format_of(op.x, dx);
    return done;
  }
  const PreparedBackward done = run_backward(op, Answer::kOutput);
  const auto [dx, dweight, dbias] = done.gradients.tensors();
  return {dx, dweight, dbias, op.activation.y ? done.dz : at::Tensor()};
}

namespace {

void register_ops(::torch::Library& m) {
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_statistics", &Taken<StatisticsOp, &statistics>::call);
  m.impl("batch_norm_gradient_sums", &Taken<GradientSumsOp, &gradient_sums>::call);
  m.impl("batch_norm_with_statistics", &Taken<WithStatisticsOp, &with_statistics>::call);
}

}  // namespace

NORMSCOPE_FOR_ALL_DEVICES(register_ops);

}  // namespace normscope::binding::backend
