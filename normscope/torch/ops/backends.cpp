// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/ops/arguments.h"
#include "normscope/torch/ops/backend_call.h"
#include "normscope/torch/ops/finite.h"
#include "normscope/torch/ops/operators.h"
#include "normscope/torch/tensors/call_site.h"
#include "normscope/torch/tensors/device.h"
#include "normscope/torch/tensors/huge_pages.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding::backend {
namespace {

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// Whether this forward repeats an earlier one, as activation checkpointing does. Its batch is then
// already in the running statistics.
bool runs_inside_a_backward() { return ::torch::autograd::get_current_graph_task_id() >= 0; }

// As in torch, running statistics do not change if nothing counts a cumulative average's updates.
RunningUpdate running_update(const ForwardOpArguments& op) {
  RunningUpdate running;
  running.momentum = op.momentum.value_or(0.0);
  if (runs_inside_a_backward()) return running;
  running.mean = mutable_channel_view(op.running_mean);
  running.var = mutable_channel_view(op.running_var);
  if (op.num_batches_tracked) {
    running.updates = op.num_batches_tracked->mutable_data_ptr<std::int64_t>();
  }
  return running;
}

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

PreparedForward prepare_forward(const ForwardOpArguments& op, const ActivationCall& activation,
                                Answer answer, const Scope& scope, CallSite& site) {
  const Slicing slicing = checked(op, scope);
  const ActivationFunction function = checked(activation, op.x);
  const std::int64_t slices = slice_count(op.x.size(0), slicing.slices_wanted);
  site.prepare(op.x, slices);
  PreparedForward prepared;
  if (answer == Answer::kOutput) {
    prepared.y = empty_output(op.x);
    prefer_huge_pages(prepared.y);
    prepared.x = in_layout_of(prepared.y, op.x);
    prepared.arguments.y = mutable_view(prepared.y);
    prepared.arguments.activation = function;
    if (activation.residual) {
      prepared.residual = in_layout_of(prepared.y, *activation.residual);
      prepared.arguments.residual = view(prepared.residual);
    }
  } else {
    prepared.coefficients = empty_coefficients(op.x, slices, Coefficients::kNormalize);
    prepared.x = in_kernel_layout(op.x);
    prepared.arguments.coefficients = {prepared.coefficients.mutable_data_ptr()};
  }
  prepared.weight = contiguous(op.weight);
  prepared.bias = contiguous(op.bias);
  prepared.statistics = at::empty({slices, 3, op.x.size(1)}, float64_options(op.x));

  ForwardArguments& arguments = prepared.arguments;
  arguments.x = view(prepared.x);
  arguments.weight = channel_view(prepared.weight);
  arguments.bias = channel_view(prepared.bias);
  arguments.running = running_update(op);
  if (op.accumulated && !runs_inside_a_backward()) {
    arguments.accumulated = {op.accumulated->mutable_data_ptr<double>(), op.x.size(1)};
  }
  if (!op.momentum && arguments.running.updates != nullptr) {
    arguments.running_average = RunningAverage::kCumulative;
  }
  arguments.eps = op.eps;
  arguments.slices = slices;
  arguments.slice_stats = slicing.slice_stats;
  arguments.backward =
      op.needs_backward.value_or(false) ? BackwardNeeded::kYes : BackwardNeeded::kNo;
  arguments.statistics = prepared.statistics.mutable_data_ptr<double>();
  return prepared;
}

// Tells autograd that the buffers were written.
void bump_versions(const ForwardOpArguments& op) {
  if (runs_inside_a_backward()) return;
  for (const OptionalTensor* buffer :
       {&op.running_mean, &op.running_var, &op.num_batches_tracked, &op.accumulated}) {
    if (*buffer && !(*buffer)->is_inference()) ::torch::autograd::impl::bump_version(**buffer);
  }
}

PreparedForward run_forward(const ForwardOpArguments& op, const ActivationCall& activation,
                            Answer answer) {
  CallSite site(op.x);
  const ExchangeUse exchange(Direction::kForward, op.call, site.placement());
  PreparedForward prepared = prepare_or_fail(
      exchange, [&] { return prepare_forward(op, activation, answer, exchange.scope(), site); });

  check_finite(op.x, exchange.get(), Direction::kForward, op.call);
  run_as_torch(op.x, exchange,
               [&] { batch_norm_forward(prepared.arguments, site.with(exchange, op.call)); });
  return prepared;
}

std::tuple<at::Tensor, at::Tensor> forward_activated(const ForwardOpArguments& op,
                                                     const ActivationCall& activation) {
  const PreparedForward done = run_forward(op, activation, Answer::kOutput);
  bump_versions(op);
  return {done.y, done.statistics};
}

std::tuple<at::Tensor, at::Tensor> forward(const ForwardOpArguments& op) {
  return forward_activated(op, ActivationCall{});
}

std::tuple<at::Tensor, at::Tensor> act_forward(const ActivatedForwardOpArguments& op) {
  return forward_activated(op.layer, op.activation);
}

StatisticsTensors statistics(const ForwardOpArguments& op) {
  const auto copy = [](const OptionalTensor& buffer) {
    return buffer ? OptionalTensor(buffer->clone()) : std::nullopt;
  };
  const OptionalTensor running_mean = copy(op.running_mean);
  const OptionalTensor running_var = copy(op.running_var);
  const OptionalTensor num_batches_tracked = copy(op.num_batches_tracked);
  const OptionalTensor accumulated = copy(op.accumulated);
  const PreparedForward done = run_forward(
      {op.x, op.weight, op.bias, running_mean, running_var, num_batches_tracked, op.momentum,
       op.eps, op.dims, op.slice_stats, op.call, accumulated, op.needs_backward},
      ActivationCall{}, Answer::kCoefficients);
  const auto given = [&](const OptionalTensor& buffer) {
    return buffer ? *buffer : at::empty({0}, op.x.options());
  };
  return {done.statistics,    done.coefficients,          given(running_mean),
          given(running_var), given(num_batches_tracked), given(accumulated)};
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

PreparedBackward prepare_backward(const BackwardOpArguments& op, Answer answer, CallSite& site) {
  check_arguments(op);
  const std::int64_t slices = op.statistics.size(0);
  site.prepare(op.x, slices);
  const bool wants_dx = op.wanted.dx && answer == Answer::kOutput;
  PreparedBackward prepared{
      .x = {},
      .dy = {},
      .weight = contiguous(op.weight),
      .gradients = {op.x, {wants_dx, op.wanted.dweight, op.wanted.dbias}},
      .coefficients = {},
      .arguments = {},
      .bias = std::nullopt,
      .y = {},
      .dz = {},
  };
  const Gradients& gradients = prepared.gradients;
  BackwardArguments& arguments = prepared.arguments;
  if (wants_dx) {
    prefer_huge_pages(gradients.dx);
    prepared.x = in_layout_of(gradients.dx, op.x);
    arguments.dx = mutable_view(gradients.dx);
  } else {
    prepared.x = in_kernel_layout(op.x);
  }
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
  return prepared;
}

// Sets up the memory and the arguments of the activation in a backward.
void prepare_activation(const ActivatedBackwardOpArguments& op, const ActivationFunction& function,
                        PreparedBackward& prepared) {
  BackwardArguments& arguments = prepared.arguments;
  arguments.activation = function;
  prepared.bias = contiguous(op.bias);
  arguments.bias = channel_view(prepared.bias);
  if (op.y) {
    prepared.y = in_layout_of(prepared.x, *op.y);
    arguments.y = view(prepared.y);
  }
  const bool is_on_device = placement_of(op.layer.x).memory == Memory::kDevice;
  if (needs_dz(function, op.y.has_value(), is_on_device)) {
    prepared.dz = empty_output(op.layer.x);
    // Like all tensors of a call, dz has the layout of x.
    prepared.dz = in_layout_of(prepared.x, prepared.dz);
    arguments.dz = mutable_view(prepared.dz);
  }
}

template <class Prepare>
PreparedBackward run_prepared_backward(const BackwardOpArguments& op, const Prepare& prepare) {
  CallSite site(op.x);
  const ExchangeUse exchange(Direction::kBackward, op.call, site.placement());
  PreparedBackward prepared = prepare_or_fail(exchange, [&] { return prepare(site); });

  check_finite(op.dy, exchange.get(), Direction::kBackward, op.call);
  run_as_torch(op.x, exchange,
               [&] { batch_norm_backward(prepared.arguments, site.with(exchange, op.call)); });
  return prepared;
}

PreparedBackward run_backward(const BackwardOpArguments& op, Answer answer) {
  return run_prepared_backward(op,
                               [&](CallSite& site) { return prepare_backward(op, answer, site); });
}

ActivatedGradientTensors act_backward(const ActivatedBackwardOpArguments& op) {
  const PreparedBackward done = run_prepared_backward(op.layer, [&](CallSite& site) {
    const ActivationFunction function = checked(op);
    PreparedBackward prepared = prepare_backward(op.layer, Answer::kOutput, site);
    prepare_activation(op, function, prepared);
    return prepared;
  });
  const auto [dx, dweight, dbias] = done.gradients.tensors();
  return {dx, dweight, dbias, op.y ? done.dz : at::empty({0}, op.layer.x.options())};
}

GradientTensors backward(const BackwardOpArguments& op) {
  return run_backward(op, Answer::kOutput).gradients.tensors();
}

GradientTensors gradient_sums(const BackwardOpArguments& op) {
  const PreparedBackward done = run_backward(op, Answer::kCoefficients);
  return {done.coefficients, done.gradients.dweight, done.gradients.dbias};
}

at::Tensor with_statistics(const WithStatisticsOpArguments& op) {
  check_arguments(op);
  CallSite site(op.x);
  site.prepare(op.x, op.statistics.size(0));
  const at::Tensor y = empty_output(op.x);
  prefer_huge_pages(y);
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

void register_ops(::torch::Library& m) {
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_act_forward", &Taken<ActivatedForwardOp, &act_forward>::call);
  m.impl("batch_norm_act_backward", &Taken<ActivatedBackwardOp, &act_backward>::call);
  m.impl("batch_norm_statistics", &Taken<StatisticsOp, &statistics>::call);
  m.impl("batch_norm_gradient_sums", &Taken<BackwardOp, &gradient_sums>::call);
  m.impl("batch_norm_with_statistics", &Taken<WithStatisticsOp, &with_statistics>::call);
}

}  // namespace

// The same for both: x tells which kernels to use.
TORCH_LIBRARY_IMPL(normscope, CPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(normscope, CUDA, m) { register_ops(m); }

}  // namespace normscope::binding::backend
