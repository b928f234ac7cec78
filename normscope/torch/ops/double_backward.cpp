// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
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
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding::backend {
namespace {

// The rows of sums(); the formulas are in docs/numerics.md, "Double backward".
enum Row { kDy, kDyXhat, kA, kAXhat, kADy, kBDy, kBDyXhat };

// The sums [C] of a tensor [N, C, *].
at::Tensor per_channel(const at::Tensor& tensor) {
  return tensor.transpose(0, 1).flatten(1).sum(1);
}

// The gradient of backward over one norm batch, in float64: docs/numerics.md, "Double backward".
// Uses plain tensor operations, because few networks differentiate twice.
class DoubleBackward {
 public:
  // The op's arguments for one norm batch; statistics: [3, C].
  explicit DoubleBackward(const DoubleBackwardOpArguments& arguments)
      : x_(arguments.x.to(at::kDouble)), dy_(arguments.dy.to(at::kDouble)) {
    const at::Tensor zeros = at::zeros({x_.size(1)}, x_.options());
    const auto parameter = [&](const OptionalTensor& tensor, const at::Tensor& otherwise) {
      return along_channels(x_, tensor ? tensor->to(at::kDouble) : otherwise);
    };
    a_ = arguments.grad_dx ? arguments.grad_dx->to(at::kDouble) : at::zeros_like(x_);
    b_ = parameter(arguments.grad_dweight, zeros);
    c_ = parameter(arguments.grad_dbias, zeros);
    weight_ = parameter(arguments.weight, at::ones_like(zeros));
    inv_std_ = along_channels(x_, arguments.statistics[2]);
    xhat_ = x_.sub(along_channels(x_, arguments.statistics[0]))
                .sub_(along_channels(x_, arguments.statistics[1]))
                .mul_(inv_std_);
  }

  // The number of elements per channel of this rank's share of the norm batch.
  [[nodiscard]] std::int64_t count() const { return elements_per_channel(x_).expect_int(); }

  // The sums [k, C] over it, in the order of Row.
  [[nodiscard]] at::Tensor sums() const {
    const at::Tensor dy = per_channel(dy_);
    const at::Tensor dy_xhat = per_channel(dy_ * xhat_);
    const at::Tensor b = b_.flatten();
    return at::stack({dy, dy_xhat, per_channel(a_), per_channel(a_ * xhat_), per_channel(a_ * dy_),
                      b * dy, b * dy_xhat});
  }

  // The op's results; the last is the sum over this rank's samples. `means` are the totals of
  // sums(), divided by the total of count().
  [[nodiscard]] GradientTensors gradients(const at::Tensor& means) const {
    const auto mean = [&](Row row) { return along_channels(x_, means[row]); };
    const auto project = [&](const at::Tensor& v, Row of_v, Row of_v_xhat) {
      return v - mean(of_v) - xhat_ * mean(of_v_xhat);
    };
    const at::Tensor p_dy = project(dy_, kDy, kDyXhat);
    const at::Tensor p_a = project(a_, kA, kAXhat);
    const at::Tensor p_b_dy = project(b_ * dy_, kBDy, kBDyXhat);

    const at::Tensor covariance = mean(kADy) - mean(kA) * mean(kDy) - mean(kAXhat) * mean(kDyXhat);
    const at::Tensor scale = weight_ * inv_std_;
    const at::Tensor of_projections =
        mean(kDyXhat) * p_a + mean(kAXhat) * p_dy + covariance * xhat_;
    return {scale * p_a + b_ * xhat_ + c_, inv_std_ * (p_b_dy - scale * of_projections),
            per_channel(inv_std_ * dy_ * p_a)};
  }

 private:
  at::Tensor x_;        // [N, C, *]
  at::Tensor dy_;       // [N, C, *]
  at::Tensor xhat_;     // [N, C, *]
  at::Tensor a_;        // [N, C, *] gradient with respect to dx
  at::Tensor b_;        // [1, C, 1...] gradient with respect to dweight
  at::Tensor c_;        // [1, C, 1...] gradient with respect to dbias
  at::Tensor weight_;   // [1, C, 1...]
  at::Tensor inv_std_;  // [1, C, 1...]
};

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
at::Tensor means_of(const at::Tensor& sums, std::int64_t own_count, const CallLabel& label,
                    Exchange* exchange) {
  if (exchange == nullptr) return sums.div(own_count);
  const at::Tensor message =
      at::empty({sums.numel() + kHeaderSize}, at::TensorOptions().dtype(at::kDouble));
  const at::Tensor totals = message.narrow(0, 0, sums.numel()).view(sums.sizes()).copy_(sums);
  const at::Tensor count = message[sums.numel()].fill_(own_count);
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
  const at::Tensor weight_total = at::zeros({x.size(1)}, x.options().dtype(at::kDouble));
  const std::vector<at::Tensor> all_dy = grad_dy.chunk(op.statistics.size(0));
  const std::vector<at::Tensor> all_x = grad_x.chunk(op.statistics.size(0));
  for (std::size_t i = 0; i < norm_batches.size(); ++i) {
    const at::Tensor sums = norm_batches[i].sums();
    check_finite(sums, exchange, Direction::kDoubleBackward, op.call);
    const at::Tensor means = means_of(sums, norm_batches[i].count(), label, exchange);
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
