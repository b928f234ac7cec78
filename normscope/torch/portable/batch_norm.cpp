// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/portable/batch_norm.h"

#include <optional>
#include <tuple>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "normscope/torch/calls/checks.h"
#include "normscope/torch/calls/finite.h"
#include "normscope/torch/calls/run_with_exchange.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/kernels_in_use.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {
namespace {

// Above this number of ranks, they add float64 sums instead of gathering statistics: the gathered
// rows would take longer than the cancellation of the sums costs.
constexpr std::int64_t kMostGathered = 64;

CallLabel label_of(const ForwardOpArguments& op) {
  return {
      .layer = op.call.layer,
      .scope = op.call.scope,
      .kernels = "torch",
      .direction = Direction::kForward,
      .channels = op.x.size(1),
      .dtype = dtype_name_of(op.x),
      .backward = op.needs_backward.value_or(false) ? BackwardNeeded::kYes : BackwardNeeded::kNo,
      .eps = op.eps,
      .momentum = op.momentum.value_or(kCumulativeAverage)};
}

// The sums of all ranks in place of their statistics, for many ranks.
Statistics statistics_by_sums(TensorMessage& message, const CallLabel& label, std::int64_t count,
                              const std::optional<Statistics>& own, const at::Tensor& x) {
  at::Tensor sums = at::zeros({2 * x.size(1) + 1}, float64_options(x));
  if (own) sums = sums_of(*own, sums.scalar_type());
  return statistics_of_sums(message.sum(label, count, sums), arithmetic_options(x));
}

// Memory for the results of the kernels that take it, so that nothing is missing after the
// exchange. Others allocate it themselves.
at::Tensor memory_for_result(const at::Tensor& x) {
  return has_synchronized_kernels(x) ? at::empty_like(x) : at::Tensor();
}

at::Tensor apply(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                 const at::Tensor& mean, const at::Tensor& spread, double eps, at::Tensor y) {
  if (x.numel() == 0) return at::empty_like(x);
  const OptionalTensor wide_weight = in_arithmetic(weight, x);
  const OptionalTensor wide_bias = in_arithmetic(bias, x);
  if (y.defined()) {
    return at::batch_norm_elemt_out(y, x, wide_weight, wide_bias, mean, spread, eps);
  }
  return std::get<0>(at::native_batch_norm(x, wide_weight, wide_bias, mean, spread,
                                           /*training=*/false, 0.0, eps));
}

at::Tensor apply_op(const at::Tensor& given, const OptionalTensor& weight,
                    const OptionalTensor& bias, const at::Tensor& mean, const at::Tensor& spread,
                    double eps) {
  const at::Tensor x = in_torch_layout(given);
  return apply(x, weight, bias, mean, spread, eps, memory_for_result(x));
}

at::Tensor apply_meta(const at::Tensor& x, const OptionalTensor&, const OptionalTensor&,
                      const at::Tensor&, const at::Tensor&, double) {
  return empty_output(x);
}

// By torch's synchronized kernels, which also update the running statistics.
PortableTensors forward_by_synchronized_kernels(const ForwardOpArguments& op, const at::Tensor& x,
                                                at::Tensor y, TensorMessage& message) {
  const std::int64_t count = elements_per_channel(x).expect_int();
  const std::int64_t channels = x.size(1);
  const at::TensorOptions options = arithmetic_options(x);
  const auto [own_mean, own_inv_std] =
      count > 0 ? at::batch_norm_stats(x, op.eps)
                : std::tuple(at::zeros({channels}, options), at::ones({channels}, options));
  const auto [all, counts] = message.gather(label_of(op), count, {own_mean, own_inv_std});
  const at::Tensor elements = all.select(1, 2 * channels);
  const bool updates = updates_buffers(op.running, op.accumulated);
  const bool as_torch = updates && count > 1 && updates_as_torch(op);
  at::Tensor batch_mean;
  at::Tensor batch_var;
  if (updates && !as_torch) {
    batch_mean = at::zeros({channels}, options);
    batch_var = at::zeros({channels}, options);
  }
  // In place of x, whose dtype the counts would need if no buffers are passed.
  const at::Tensor means = all.narrow(1, 0, channels);
  const auto [mean, inv_std] = at::batch_norm_gather_stats_with_counts(
      means, means, all.narrow(1, channels, channels),
      as_torch ? op.running.mean : defined_or_none(batch_mean),
      as_torch ? op.running.var : defined_or_none(batch_var), as_torch ? *op.momentum : 1.0, op.eps,
      elements);
  y = apply(x, op.weight, op.bias, mean, inv_std, op.eps, std::move(y));
  if (as_torch) {
    count_update(op.running);
  } else if (updates) {
    const at::Tensor total = elements.sum();
    update_buffers(op.running, op.momentum, op.accumulated,
                   {batch_mean, batch_var * ((total - 1) / total), total},
                   /*may_be_too_small=*/count < 2);
  }
  return {y, mean, inv_std, counts};
}

// int32 numbers of elements [ranks] with this sum [1], which alone may exceed int32.
at::Tensor counts_of(const at::Tensor& total, std::int64_t ranks) {
  const at::Tensor each = (total / static_cast<double>(ranks)).floor();
  const at::Tensor rest = total - each * (static_cast<double>(ranks) - 1);
  return at::cat({rest, each.expand({ranks - 1})}).to(at::kInt);
}

PortableTensors forward_by_sums(const ForwardOpArguments& op, const at::Tensor& x, at::Tensor y,
                                TensorMessage& message) {
  const std::int64_t count = elements_per_channel(x).expect_int();
  const std::int64_t channels = x.size(1);
  const at::TensorOptions options = arithmetic_options(x);
  std::optional<Statistics> own;
  if (count > 0) own = statistics_of(x);
  Statistics all;
  if (message.ranks() > kMostGathered) {
    all = statistics_by_sums(message, label_of(op), count, own, x);
  } else {
    const at::Tensor none = own ? at::Tensor() : at::zeros({channels}, options);
    const at::Tensor rows =
        message.gather(label_of(op), count, {own ? own->mean : none, own ? own->var : none}).rows;
    all = merged(rows.narrow(1, 0, channels), rows.narrow(1, channels, channels),
                 rows.narrow(1, 2 * channels, 1));
  }
  const bool by_inv_std = has_synchronized_kernels(x);
  const at::Tensor spread = by_inv_std ? (all.var + op.eps).rsqrt() : all.var;
  const at::Tensor total = all.count.reshape({1});
  y = apply(x, op.weight, op.bias, all.mean, spread, op.eps, std::move(y));
  const at::Tensor counts = by_inv_std ? counts_of(total, message.ranks()) : total;
  update_buffers(op.running, op.momentum, op.accumulated, all, /*may_be_too_small=*/count < 2);
  return {y, all.mean, spread, counts};
}

PortableTensors forward(const ForwardOpArguments& op) {
  return run_with_message(op.x, Direction::kForward, op.call, [&](TensorMessage& message) {
    static_cast<void>(checked(op, message.scope()));
    const at::Tensor x = in_torch_layout(op.x);
    const at::Tensor y = memory_for_result(x);
    check_finite(op.x, message.exchange().get(), Direction::kForward, op.call);
    return has_synchronized_kernels(x) && message.ranks() <= kMostGathered
               ? forward_by_synchronized_kernels(op, x, y, message)
               : forward_by_sums(op, x, y, message);
  });
}

// Replaces this rank's gradient sums by their totals.
GradientSums total_of(const GradientSums& own, const at::Tensor& x, const ScopedCall& call,
                      TensorMessage& message) {
  const std::int64_t count = elements_per_channel(x).expect_int();
  const std::int64_t channels = x.size(1);
  const CallLabel label{.layer = call.layer,
                        .scope = call.scope,
                        .kernels = "torch",
                        .direction = Direction::kBackward,
                        .channels = channels,
                        .dtype = dtype_name_of(x)};
  const at::Tensor sums = message.sum(label, count, at::cat({own.dy, own.dy_xmu}));
  return {sums.narrow(0, 0, channels), sums.narrow(0, channels, channels)};
}

// `op` has x and dy in a layout of torch.
GradientTensors gradients(const PortableBackwardArguments& op, TensorMessage& message) {
  const at::Tensor& x = op.x;
  const bool by_synchronized_kernels = has_synchronized_kernels(x) && x.numel() > 0;
  GradientSums own;
  at::Tensor dweight;
  at::Tensor dbias;
  if (by_synchronized_kernels) {
    std::tie(own.dy, own.dy_xmu, dweight, dbias) =
        at::batch_norm_backward_reduce(op.dy, x, op.mean, op.spread, op.weight, /*input_g=*/true,
                                       op.wanted.dweight, op.wanted.dbias);
  } else {
    own = gradient_sums_of(op);
    if (op.wanted.dweight) dweight = own.dy_xmu * inv_std_of(x, op.spread, op.eps);
    dbias = own.dy;
  }
  const GradientSums totals = total_of(own, x, op.call, message);
  at::Tensor dx = at::empty({0}, x.options());
  if (op.wanted.dx) {
    dx = by_synchronized_kernels
             ? at::batch_norm_backward_elemt(op.dy, x, op.mean, op.spread, op.weight, totals.dy,
                                             totals.dy_xmu, op.counts)
             : input_gradient_of(op, totals);
  }
  const at::Tensor none = at::empty({0}, arithmetic_options(x));
  return {dx, op.wanted.dweight ? dweight : none, op.wanted.dbias ? dbias : none};
}

GradientTensors backward(const PortableBackwardArguments& op) {
  return run_with_message(op.x, Direction::kBackward, op.call, [&](TensorMessage& message) {
    TORCH_CHECK_NOT_IMPLEMENTED(uses_torch_kernels(op.dy), "dy: expected a dense tensor, got ",
                                op.dy.layout());
    const at::Tensor x = in_torch_layout(op.x);
    const at::Tensor dy = op.dy.contiguous(x.suggest_memory_format());
    const OptionalTensor weight = in_arithmetic(op.weight, x);
    check_finite(dy, message.exchange().get(), Direction::kBackward, op.call);
    return gradients({dy, x, weight, op.mean, op.wanted, op.call, op.spread, op.counts, op.eps},
                     message);
  });
}

PortableTensors forward_meta(const ForwardOpArguments& op) {
  static_cast<void>(checked(op, parsed_scope(op.call.scope)));
  const at::Tensor mean = at::empty_symint({op.x.sym_size(1)}, arithmetic_options(op.x));
  // The number of ranks is not known here.
  return {empty_output(op.x), mean, at::empty_like(mean), at::empty({1}, mean.options())};
}

GradientTensors backward_meta(const PortableBackwardArguments& op) {
  return Gradients(op.x, op.wanted).tensors();
}

}  // namespace

at::Tensor inv_std_of(const at::Tensor& x, const at::Tensor& spread, double eps) {
  return has_synchronized_kernels(x) ? spread : (spread + eps).rsqrt();
}

at::Tensor stored_statistics(const PortableBackwardArguments& op) {
  const at::Tensor mean = op.mean.to(float64_options(op.x).dtype());
  return stored_statistics(mean, inv_std_of(op.x, op.spread, op.eps).to(mean.scalar_type()));
}

GradientSums gradient_sums_of(const PortableBackwardArguments& op) {
  const at::ScalarType type = op.mean.scalar_type();
  return gradient_sums(op.dy.to(type), op.x.to(type) - along_channels(op.x, op.mean));
}

at::Tensor input_gradient_of(const PortableBackwardArguments& op, const GradientSums& totals) {
  const at::Tensor count = op.counts.sum();
  return input_gradient(op.dy, op.x - along_channels(op.x, op.mean),
                        {totals.dy / count, totals.dy_xmu / count},
                        inv_std_of(op.x, op.spread, op.eps), op.weight)
      .to(op.x.scalar_type());
}

TORCH_LIBRARY_IMPL(normscope, CompositeExplicitAutograd, m) {
  m.impl("portable_forward", &Taken<PortableForwardOp, &forward>::call);
  m.impl("portable_backward", &Taken<PortableBackwardOp, &backward>::call);
  m.impl("portable_apply", &apply_op);
}

TORCH_LIBRARY_IMPL(normscope, Meta, m) {
  m.impl("portable_forward", &Taken<PortableForwardOp, &forward_meta>::call);
  m.impl("portable_backward", &Taken<PortableBackwardOp, &backward_meta>::call);
  m.impl("portable_apply", &apply_meta);
}

}  // namespace normscope::binding
