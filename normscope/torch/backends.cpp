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

using GradientTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

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
  return {.mean = mutable_channel_view(op.running_mean),
          .var = mutable_channel_view(op.running_var),
          .momentum = op.momentum.value_or(0.0),
          .updates = op.num_batches_tracked
                         ? op.num_batches_tracked->mutable_data_ptr<std::int64_t>()
                         : nullptr};
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

PreparedForward prepare_forward(const ForwardOpArguments& op, bool needs_backward, CallSite& site) {
  check_arguments(op);
  const std::int64_t slices = slice_count(op.x.size(0), slices_wanted(op.scope));
  site.prepare(op.x, slices);
  const at::Tensor y = empty_output(op.x);
  prefer_huge_pages(y);
  const bool is_cumulative = !op.momentum && op.num_batches_tracked;
  PreparedForward prepared{
      .x = in_layout_of(y, op.x),
      .weight = contiguous(op.weight),
      .bias = contiguous(op.bias),
      .y = y,
      .statistics = at::empty({slices, 3, op.x.size(1)}, wide(op.x)),
      .arguments = {},
  };
  prepared.arguments = {
      .x = view(prepared.x),
      .y = mutable_view(prepared.y),
      .weight = channel_view(prepared.weight),
      .bias = channel_view(prepared.bias),
      .running = running_update(op),
      .running_average = is_cumulative ? RunningAverage::kCumulative : RunningAverage::kExponential,
      .eps = op.eps,
      .slices = slices,
      .slice_stats = parse_slice_stats(op.slice_stats),
      .backward = needs_backward ? BackwardNeeded::kYes : BackwardNeeded::kNo,
      .statistics = prepared.statistics.mutable_data_ptr<double>(),
  };
  return prepared;
}

// Autograd has to know that they were written.
void bump_versions(const ForwardOpArguments& op) {
  for (const OptionalTensor* buffer :
       {&op.running_mean, &op.running_var, &op.num_batches_tracked}) {
    if (*buffer && !(*buffer)->is_inference()) ::torch::autograd::impl::bump_version(**buffer);
  }
}

std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, std::optional<double> momentum, double eps,
    at::IntArrayRef dims, std::string_view scope, std::string_view slice_stats, bool needs_backward,
    std::string_view group_name, std::string_view layer) {
  const bool updates = !runs_inside_a_backward();
  const OptionalTensor none;
  const ForwardOpArguments op{x,
                              weight,
                              bias,
                              updates ? running_mean : none,
                              updates ? running_var : none,
                              updates ? num_batches_tracked : none,
                              momentum,
                              eps,
                              dims,
                              scope,
                              slice_stats};
  CallSite site(x);
  const ExchangeUse exchange(Direction::kForward, scope, group_name, layer, site.placement());
  const PreparedForward prepared =
      prepare_or_fail(exchange, [&] { return prepare_forward(op, needs_backward, site); });

  check_finite(x, exchange.get(), Direction::kForward, scope, layer);
  run_as_torch(x, exchange,
               [&] { batch_norm_forward(prepared.arguments, site.with(exchange, scope, layer)); });
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

PreparedBackward prepare_backward(const at::Tensor& dy, const at::Tensor& x,
                                  const OptionalTensor& weight, const at::Tensor& statistics,
                                  const Wanted& wanted, std::string_view scope, CallSite& site) {
  check_arguments({dy, x, weight, statistics, scope});
  site.prepare(x, statistics.size(0));
  const Gradients gradients(x, wanted);
  prefer_huge_pages(gradients.dx);
  const at::Tensor layout = wanted.dx ? gradients.dx : empty_output(x);
  PreparedBackward prepared{
      .x = in_layout_of(layout, x),
      .dy = in_layout_of(layout, dy),
      .weight = contiguous(weight),
      .gradients = gradients,
      .arguments = {},
  };
  prepared.arguments = {
      .x = view(prepared.x),
      .dy = view(prepared.dy),
      .dx = wanted.dx ? mutable_view(gradients.dx) : MutableTensorView{},
      .weight = channel_view(prepared.weight),
      .statistics = statistics.const_data_ptr<double>(),
      .slices = statistics.size(0),
      .dweight = wanted.dweight ? mutable_channel_view(gradients.dweight) : MutableChannelView{},
      .dbias = wanted.dbias ? mutable_channel_view(gradients.dbias) : MutableChannelView{},
  };
  return prepared;
}

GradientTensors backward(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                         const at::Tensor& statistics, bool wants_dx, bool wants_dweight,
                         bool wants_dbias, std::string_view scope, std::string_view group_name,
                         std::string_view layer) {
  CallSite site(x);
  const ExchangeUse exchange(Direction::kBackward, scope, group_name, layer, site.placement());
  const PreparedBackward prepared = prepare_or_fail(exchange, [&] {
    return prepare_backward(dy, x, weight, statistics,
                            {.dx = wants_dx, .dweight = wants_dweight, .dbias = wants_dbias}, scope,
                            site);
  });

  check_finite(dy, exchange.get(), Direction::kBackward, scope, layer);
  run_as_torch(x, exchange,
               [&] { batch_norm_backward(prepared.arguments, site.with(exchange, scope, layer)); });
  return prepared.gradients.tensors();
}

// One for each slice of the batch.
std::vector<DoubleBackward> prepare_double_backward(const DoubleBackwardArguments& whole) {
  const std::int64_t slices = whole.statistics.size(0);
  const std::vector<at::Tensor> x = whole.x.chunk(slices);
  const std::vector<at::Tensor> dy = whole.dy.chunk(slices);
  const std::vector<at::Tensor> grad_dx =
      whole.grad_dx ? whole.grad_dx->chunk(slices) : std::vector<at::Tensor>();
  std::vector<DoubleBackward> norm_batches;
  for (std::size_t i = 0; i < x.size(); ++i) {
    DoubleBackwardArguments slice = whole;
    if (whole.grad_dx) slice.grad_dx = grad_dx[i];
    slice.dy = dy[i];
    slice.x = x[i];
    slice.statistics = whole.statistics[static_cast<std::int64_t>(i)];
    norm_batches.emplace_back(slice);
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

GradientTensors double_backward(const OptionalTensor& grad_dx, const OptionalTensor& grad_dweight,
                                const OptionalTensor& grad_dbias, const at::Tensor& dy,
                                const at::Tensor& x, const OptionalTensor& weight,
                                const at::Tensor& statistics, std::string_view scope,
                                std::string_view group_name, std::string_view layer) {
  const CallSite site(x);
  const ExchangeUse exchange(Direction::kDoubleBackward, scope, group_name, layer,
                             site.placement());
  const CallLabel label{.layer = layer,
                        .scope = scope,
                        .direction = Direction::kDoubleBackward,
                        .channels = x.size(1)};
  const std::vector<DoubleBackward> norm_batches = prepare_or_fail(exchange, [&] {
    check_arguments({grad_dx, grad_dweight, grad_dbias, {dy, x, weight, statistics, scope}});
    TORCH_CHECK(slice_count(x.size(0), statistics.size(0)) == statistics.size(0),
                "statistics: expected those of slices of x, got ", statistics.size(0), " for ",
                x.size(0), " samples");
    return prepare_double_backward({grad_dx, grad_dweight, grad_dbias, dy, x, weight, statistics});
  });

  const SecondGradients all = empty_second_gradients(x);
  const at::Tensor weight_total = at::zeros({x.size(1)}, wide(x));
  const std::vector<at::Tensor> all_dy = all.dy.chunk(statistics.size(0));
  const std::vector<at::Tensor> all_x = all.x.chunk(statistics.size(0));
  for (std::size_t i = 0; i < norm_batches.size(); ++i) {
    check_finite(norm_batches[i].sums(), exchange.get(), Direction::kDoubleBackward, scope, layer);
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

at::Tensor apply(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                 const at::Tensor& statistics) {
  check_arguments({x, weight, bias, statistics});
  CallSite site(x);
  site.prepare(x, statistics.size(0));
  const at::Tensor y = empty_output(x);
  prefer_huge_pages(y);
  const at::Tensor x_in_layout = in_layout_of(y, x);
  const OptionalTensor own_weight = contiguous(weight);
  const OptionalTensor own_bias = contiguous(bias);
  const ApplyArguments arguments{
      .x = view(x_in_layout),
      .y = mutable_view(y),
      .weight = channel_view(own_weight),
      .bias = channel_view(own_bias),
      .statistics = statistics.const_data_ptr<double>(),
      .slices = statistics.size(0),
  };
  batch_norm_apply(arguments, site.alone());
  return y;
}

void register_ops(::torch::Library& m) {
  m.impl("batch_norm_forward", &forward);
  m.impl("batch_norm_backward", &backward);
  m.impl("batch_norm_double_backward", &double_backward);
  m.impl("batch_norm_apply", &apply);
}

}  // namespace

// The same on both: x says where the kernels are.
TORCH_LIBRARY_IMPL(normscope, CPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(normscope, CUDA, m) { register_ops(m); }

}  // namespace normscope::binding
