// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/error.h"
#include "normscope/torch/arguments.h"
#include "normscope/torch/call_site.h"
#include "normscope/torch/device.h"
#include "normscope/torch/double_backward.h"
#include "normscope/torch/exchanges.h"
#include "normscope/torch/finite.h"
#include "normscope/torch/huge_pages.h"
#include "normscope/torch/operators.h"
#include "normscope/torch/results.h"
#include "normscope/torch/tensor_view.h"

namespace normscope::binding {
namespace {

// Runs what comes before the exchange. The peers of a rank that fails there need not wait for it.
template <class Prepare>
auto prepare_or_fail(const ExchangeUse& exchange, const Prepare& prepare) {
  try {
    return prepare();
  } catch (const c10::Error& error) {
    exchange.fail(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    exchange.fail(error.what());
    throw;
  }
}

// Runs what meets the other ranks; its errors get the types that torch's own have in Python.
template <class Call>
void run_as_torch(const at::Tensor& x, const ExchangeUse& exchange, const Call& call) {
  try {
    call();
  } catch (const OneValueError& error) {
    // On a device the ranks find it together, and this one is told at its next call, of another x.
    const bool is_told_later =
        exchange.get() != nullptr && placement_of(x).memory == Memory::kDevice;
    if (is_told_later) TORCH_CHECK_VALUE(false, error.what());
    throw_one_value_per_channel(x);
  } catch (const ArgumentError& error) {
    exchange.fail(error.what());
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const CommunicationError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  } catch (const MismatchError& error) {
    C10_THROW_ERROR(DistError, error.what());
  }
}

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// Such a forward repeats one that was made before, as activation checkpointing does: its batch is
// in the running statistics already.
bool runs_inside_a_backward() { return ::torch::autograd::get_current_graph_task_id() >= 0; }

// As torch, running statistics stay where nothing counts the updates of a cumulative average.
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

// Tensors of one forward, whose storage the arguments point to.
struct PreparedForward {
  at::Tensor x;
  OptionalTensor weight;
  OptionalTensor bias;
  at::Tensor y;
  at::Tensor statistics;
  ForwardArguments arguments;
};

PreparedForward prepare_forward(const ForwardOpArguments& op, const Scope& scope, CallSite& site) {
  const Slicing slicing = checked(op, scope);
  const std::int64_t slices = slice_count(op.x.size(0), slicing.slices_wanted);
  site.prepare(op.x, slices);
  const at::Tensor y = empty_output(op.x);
  prefer_huge_pages(y);
  PreparedForward prepared{
      .x = in_layout_of(y, op.x),
      .weight = contiguous(op.weight),
      .bias = contiguous(op.bias),
      .y = y,
      .statistics = at::empty({slices, 3, op.x.size(1)}, float64_options(op.x)),
      .arguments = {},
  };
  const RunningUpdate running = running_update(op);
  const bool is_cumulative = !op.momentum && running.updates != nullptr;
  prepared.arguments = {
      .x = view(prepared.x),
      .y = mutable_view(prepared.y),
      .weight = channel_view(prepared.weight),
      .bias = channel_view(prepared.bias),
      .running = running,
      .running_average = is_cumulative ? RunningAverage::kCumulative : RunningAverage::kExponential,
      .eps = op.eps,
      .slices = slices,
      .slice_stats = slicing.slice_stats,
      .backward = op.needs_backward.value_or(false) ? BackwardNeeded::kYes : BackwardNeeded::kNo,
      .statistics = prepared.statistics.mutable_data_ptr<double>(),
  };
  return prepared;
}

// Autograd has to know that they were written.
void bump_versions(const ForwardOpArguments& op) {
  if (runs_inside_a_backward()) return;
  for (const OptionalTensor* buffer :
       {&op.running_mean, &op.running_var, &op.num_batches_tracked}) {
    if (*buffer && !(*buffer)->is_inference()) ::torch::autograd::impl::bump_version(**buffer);
  }
}

std::tuple<at::Tensor, at::Tensor> forward(const ForwardOpArguments& op) {
  CallSite site(op.x);
  const ExchangeUse exchange(Direction::kForward, op.call, site.placement());
  const PreparedForward prepared =
      prepare_or_fail(exchange, [&] { return prepare_forward(op, exchange.scope(), site); });

  check_finite(op.x, exchange.get(), Direction::kForward, op.call);
  run_as_torch(op.x, exchange,
               [&] { batch_norm_forward(prepared.arguments, site.with(exchange, op.call)); });
  bump_versions(op);
  return {prepared.y, prepared.statistics};
}

// Tensors of one backward, whose storage the arguments point to.
struct PreparedBackward {
  at::Tensor x;
  at::Tensor dy;
  OptionalTensor weight;
  Gradients gradients;
  BackwardArguments arguments;
};

PreparedBackward prepare_backward(const BackwardOpArguments& op, CallSite& site) {
  check_arguments(op);
  site.prepare(op.x, op.statistics.size(0));
  const Gradients gradients(op.x, op.wanted);
  prefer_huge_pages(gradients.dx);
  const at::Tensor layout = op.wanted.dx ? gradients.dx : empty_output(op.x);
  PreparedBackward prepared{
      .x = in_layout_of(layout, op.x),
      .dy = in_layout_of(layout, op.dy),
      .weight = contiguous(op.weight),
      .gradients = gradients,
      .arguments = {},
  };
  prepared.arguments = {
      .x = view(prepared.x),
      .dy = view(prepared.dy),
      .dx = op.wanted.dx ? mutable_view(gradients.dx) : MutableTensorView{},
      .weight = channel_view(prepared.weight),
      .statistics = op.statistics.const_data_ptr<double>(),
      .slices = op.statistics.size(0),
      .dweight = op.wanted.dweight ? mutable_channel_view(gradients.dweight) : MutableChannelView{},
      .dbias = op.wanted.dbias ? mutable_channel_view(gradients.dbias) : MutableChannelView{},
  };
  return prepared;
}

GradientTensors backward(const BackwardOpArguments& op) {
  CallSite site(op.x);
  const ExchangeUse exchange(Direction::kBackward, op.call, site.placement());
  const PreparedBackward prepared =
      prepare_or_fail(exchange, [&] { return prepare_backward(op, site); });

  check_finite(op.dy, exchange.get(), Direction::kBackward, op.call);
  run_as_torch(op.x, exchange,
               [&] { batch_norm_backward(prepared.arguments, site.with(exchange, op.call)); });
  return prepared.gradients.tensors();
}

// One for each slice of the batch.
std::vector<DoubleBackward> prepare_double_backward(const DoubleBackwardOpArguments& op) {
  check_arguments(op);
  const std::int64_t slices = op.statistics.size(0);
  TORCH_CHECK(slice_count(op.x.size(0), slices) == slices,
              "statistics: expected those of slices of x, got ", slices, " for ", op.x.size(0),
              " samples");
  const std::vector<at::Tensor> x = op.x.chunk(slices);
  const std::vector<at::Tensor> dy = op.dy.chunk(slices);
  const std::vector<at::Tensor> grad_dx =
      op.grad_dx ? op.grad_dx->chunk(slices) : std::vector<at::Tensor>(x.size());
  std::vector<DoubleBackward> norm_batches;
  for (std::size_t i = 0; i < x.size(); ++i) {
    norm_batches.emplace_back(
        DoubleBackwardArguments{.grad_dx = defined_or_none(grad_dx[i]),
                                .grad_dweight = op.grad_dweight,
                                .grad_dbias = op.grad_dbias,
                                .dy = dy[i],
                                .x = x[i],
                                .weight = op.weight,
                                .statistics = op.statistics[static_cast<std::int64_t>(i)]});
  }
  return norm_batches;
}

// The means of a norm batch from one rank's sums: one message, that of all sums and the count. It
// goes through the host's memory whatever the device: few networks differentiate twice.
at::Tensor means_of(const DoubleBackward& norm_batch, const CallLabel& label, Exchange* exchange) {
  const at::Tensor& sums = norm_batch.sums();
  if (exchange == nullptr) return sums.div(norm_batch.count());
  const at::Tensor message =
      at::empty({sums.numel() + kHeaderSize}, at::TensorOptions().dtype(at::kDouble));
  const at::Tensor totals = message.narrow(0, 0, sums.numel()).view(sums.sizes()).copy_(sums);
  const at::Tensor count = message[sums.numel()].fill_(norm_batch.count());
  exchange->all_reduce(
      label, {message.mutable_data_ptr<double>(), static_cast<std::size_t>(message.numel())},
      Stream{});
  return totals.div(count).to(sums.device());
}

GradientTensors double_backward(const DoubleBackwardOpArguments& op) {
  const at::Tensor& x = op.x;
  const CallSite site(x);
  const ExchangeUse exchange(Direction::kDoubleBackward, op.call, site.placement());
  const CallLabel label{.layer = op.call.layer,
                        .scope = op.call.scope,
                        .direction = Direction::kDoubleBackward,
                        .channels = x.size(1)};
  const std::vector<DoubleBackward> norm_batches =
      prepare_or_fail(exchange, [&] { return prepare_double_backward(op); });

  const SecondGradients all = empty_second_gradients(x);
  const at::Tensor weight_total = at::zeros({x.size(1)}, float64_options(x));
  const std::vector<at::Tensor> all_dy = all.dy.chunk(op.statistics.size(0));
  const std::vector<at::Tensor> all_x = all.x.chunk(op.statistics.size(0));
  for (std::size_t i = 0; i < norm_batches.size(); ++i) {
    check_finite(norm_batches[i].sums(), exchange.get(), Direction::kDoubleBackward, op.call);
    at::Tensor means;
    run_as_torch(x, exchange, [&] { means = means_of(norm_batches[i], label, exchange.get()); });
    const SecondGradients slice = norm_batches[i].gradients(means);
    all_dy[i].copy_(slice.dy);
    all_x[i].copy_(slice.x);
    weight_total.add_(slice.weight);
  }
  all.weight.copy_(weight_total);
  return {all.dy, all.x, all.weight};
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
  batch_norm_with_statistics({.x = view(x),
                              .y = mutable_view(y),
                              .weight = channel_view(weight),
                              .bias = channel_view(bias),
                              .statistics = op.statistics.const_data_ptr<double>(),
                              .slices = op.statistics.size(0)},
                             site.alone());
  return y;
}

void register_ops(::torch::Library& m) {
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_double_backward", &Taken<DoubleBackwardOp, &double_backward>::call);
  m.impl("batch_norm_with_statistics", &Taken<WithStatisticsOp, &with_statistics>::call);
}

}  // namespace

// The same on both: x says where the kernels are.
TORCH_LIBRARY_IMPL(normscope, CPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(normscope, CUDA, m) { register_ops(m); }

}  // namespace normscope::binding
