// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/calls/finite.h"
#include "normscope/torch/calls/run_with_exchange.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/ops/all_devices.h"
#include "normscope/torch/ops/call_site.h"
#include "normscope/torch/ops/double_backward.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding::backend {
namespace {

// One for each slice of the batch.
std::vector<DoubleBackward> prepare_double_backward(const DoubleBackwardOpArguments& op) {
  check_arguments(op);
  const std::int64_t slices = op.statistics.size(0);
  check_slices(op.x, op.statistics);
  const std::vector<at::Tensor> x = op.x.chunk(slices);
  const std::vector<at::Tensor> dy = op.dy.chunk(slices);
  const std::vector<at::Tensor> grad_dx =
      op.grad_dx ? op.grad_dx->chunk(slices) : std::vector<at::Tensor>(x.size());
  std::vector<DoubleBackward> norm_batches;
  for (std::size_t i = 0; i < x.size(); ++i) {
    norm_batches.emplace_back(
        DoubleBackwardOpArguments{.grad_dx = defined_or_none(grad_dx[i]),
                                  .grad_dweight = op.grad_dweight,
                                  .grad_dbias = op.grad_dbias,
                                  .dy = dy[i],
                                  .x = x[i],
                                  .weight = op.weight,
                                  .statistics = op.statistics[static_cast<std::int64_t>(i)],
                                  .call = op.call});
  }
  return norm_batches;
}

// The means over a norm batch, from one rank's sums. One message holds all sums and the count. It
// goes through host memory on any device, because few networks differentiate twice.
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

GradientTensors second_gradients(const DoubleBackwardOpArguments& op, Exchange* exchange) {
  const at::Tensor& x = op.x;
  const CallLabel label{.layer = op.call.layer,
                        .scope = op.call.scope,
                        .direction = Direction::kDoubleBackward,
                        .channels = x.size(1),
                        .dtype = dtype_name_of(x)};
  const std::vector<DoubleBackward> norm_batches = prepare_double_backward(op);
  const auto [grad_dy, grad_x, grad_weight] = empty_second_gradients(x);
  const at::Tensor weight_total = at::zeros({x.size(1)}, float64_options(x));
  const std::vector<at::Tensor> all_dy = grad_dy.chunk(op.statistics.size(0));
  const std::vector<at::Tensor> all_x = grad_x.chunk(op.statistics.size(0));
  for (std::size_t i = 0; i < norm_batches.size(); ++i) {
    check_finite(norm_batches[i].sums(), exchange, Direction::kDoubleBackward, op.call);
    const at::Tensor means = means_of(norm_batches[i], label, exchange);
    const auto [of_dy, of_x, of_weight] = norm_batches[i].gradients(means);
    all_dy[i].copy_(of_dy);
    all_x[i].copy_(of_x);
    weight_total.add_(of_weight);
  }
  grad_weight.copy_(weight_total);
  return {grad_dy, grad_x, grad_weight};
}

GradientTensors double_backward(const DoubleBackwardOpArguments& given) {
  const at::Tensor statistics =
      given.spread ? portable_statistics_of(given).stored(given.x) : given.statistics;
  const DoubleBackwardOpArguments op{
      given.grad_dx, given.grad_dweight, given.grad_dbias, given.dy,
      given.x,       given.weight,       statistics,       given.call};
  const CallSite site(op.x);
  return run_with_exchange(
      op.x, Direction::kDoubleBackward, op.call, placement_of_messages(op.call, op.x),
      [&](const ExchangeUse& exchange) { return second_gradients(op, exchange.get()); });
}

void register_double_backward(::torch::Library& m) {
  m.impl("batch_norm_double_backward", &Taken<DoubleBackwardOp, &double_backward>::call);
}

}  // namespace

NORMSCOPE_FOR_ALL_DEVICES(register_double_backward);

}  // namespace normscope::binding::backend
