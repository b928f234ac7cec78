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
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
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
  const at::TensorOptions options = x.options().dtype(at::kDouble);
  const at::Tensor sums = own ? sums_of(*own) : at::zeros({2 * x.size(1)}, options);
  return statistics_of_sums(message.sum(label, count, {sums}), arithmetic_options(x));
}

// Memory for the results of the kernels that take it, so that nothing is missing after the
// exchange. Others allocate it themselves.
at::Tensor memory_for_result(const at::Tensor& x) {
  return has_synchronized_kernels(x) ? at::empty_like(x) : at::Tensor();
}

at::Tensor apply(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                 const PortableStatistics& of, at::Tensor y) {
  if (x.numel() == 0) return at::empty_like(x);
  const OptionalTensor wide_weight = in_arithmetic(weight, x);
  const OptionalTensor wide_bias = in_arithmetic(bias, x);
  if (y.defined()) {
    return at::batch_norm_elemt_out(y, x, wide_weight, wide_bias, of.mean, of.spread,
                                    /*eps=*/0.0);  // of.spread has it
  }
  return std::get<0>(at::native_batch_norm(x, wide_weight, wide_bias, of.mean, of.spread,
                                           /*training=*/false, 0.0, /*eps=*/0.0));
}

// The statistics of a norm batch, and what is left to be done for the buffers of the call.
struct NormBatch {
  PortableStatistics statistics;
  std::optional<Statistics> to_update;  // none: nothing, or torch's kernel has updated the buffers
  bool has_updated = false;
  // What the kernel has updated in place of the buffers, if the norm batch may be too small.
  OptionalTensor running_mean = std::nullopt;
  OptionalTensor running_var = std::nullopt;
};

// Only the device knows whether a norm batch has the two elements per channel that an update needs.
void update_if_large_enough(const RunningTensors& running, const NormBatch& batch) {
  const at::Tensor is_large_enough = batch.statistics.counts.sum() >= 2;
  const auto value_of = [&](const at::Tensor& updated, const OptionalTensor& buffer) {
    return at::where(is_large_enough, updated, *buffer);
  };
  // All values are computed before the first is written.
  const at::Tensor mean = value_of(*batch.running_mean, running.mean);
  const at::Tensor var = value_of(*batch.running_var, running.var);
  OptionalTensor updates;
  if (running.updates) updates = value_of(*running.updates + 1, running.updates);
  running.mean->copy_(mean);
  running.var->copy_(var);
  if (updates) running.updates->copy_(*updates);
}

void update(const ForwardOpArguments& op, const NormBatch& batch, const at::Tensor& x) {
  if (batch.running_mean) return update_if_large_enough(op.running, batch);
  if (batch.has_updated) return count_update(op.running);
  if (!batch.to_update) return;
  update_buffers(op.running, op.momentum, op.accumulated, *batch.to_update,
                 /*may_be_too_small=*/elements_per_channel(x) < 2);
}

// By torch's synchronized kernels, which also update the running statistics.
NormBatch norm_batch_by_synchronized_kernels(const ForwardOpArguments& op, const at::Tensor& x,
                                             TensorMessage& message) {
  const std::int64_t count = elements_per_channel(x).expect_int();
  const std::int64_t channels = x.size(1);
  const at::TensorOptions options = arithmetic_options(x);
  const auto [own_mean, own_inv_std] =
      count > 0 ? at::batch_norm_stats(x, op.eps)
                : std::tuple(at::zeros({channels}, options), at::ones({channels}, options));
  const auto [all, counts] = message.gather(label_of(op), count, {own_mean, own_inv_std});
  const at::Tensor elements = all.select(1, 2 * channels);
  const bool updates = updates_buffers(op.running, op.accumulated);
  const bool as_torch = updates && updates_as_torch(op);
  const bool may_be_too_small = count < 2;
  OptionalTensor running_mean;
  OptionalTensor running_var;
  if (as_torch) {
    running_mean = may_be_too_small ? copy_of(op.running.mean) : op.running.mean;
    running_var = may_be_too_small ? copy_of(op.running.var) : op.running.var;
  } else if (updates) {  // with a momentum of 1, they become those of this batch
    running_mean = at::zeros({channels}, options);
    running_var = at::zeros({channels}, options);
  }
  // In place of x, whose dtype the counts would need if no buffers are passed.
  const at::Tensor means = all.narrow(1, 0, channels);
  const auto [mean, inv_std] = at::batch_norm_gather_stats_with_counts(
      means, means, all.narrow(1, channels, channels), running_mean, running_var,
      as_torch ? *op.momentum : 1.0, op.eps, elements);
  NormBatch batch{{mean, inv_std, counts}, std::nullopt, as_torch};
  if (as_torch && may_be_too_small) {
    batch.running_mean = running_mean;
    batch.running_var = running_var;
  } else if (updates && !as_torch) {
    const at::Tensor total = elements.sum();
    batch.to_update = {*running_mean, *running_var * ((total - 1) / total), total};
  }
  return batch;
}

// int32 numbers of elements [ranks] with this sum [1], which alone may exceed int32.
at::Tensor counts_of(const at::Tensor& total, std::int64_t ranks) {
  const at::Tensor each = (total / static_cast<double>(ranks)).floor();
  const at::Tensor rest = total - each * (static_cast<double>(ranks) - 1);
  return at::cat({rest, each.expand({ranks - 1})}).to(at::kInt);
}

NormBatch norm_batch_by_sums(const ForwardOpArguments& op, const at::Tensor& x,
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
  const at::Tensor total = all.count.reshape({1});
  const at::Tensor spread = all.var + op.eps;
  return {{all.mean, by_inv_std ? spread.rsqrt() : spread,
           by_inv_std ? counts_of(total, message.ranks()) : total},
          all};
}

NormBatch norm_batch_of(const ForwardOpArguments& op, const at::Tensor& x, TensorMessage& message) {
  return has_synchronized_kernels(x) && message.ranks() <= kMostGathered
             ? norm_batch_by_synchronized_kernels(op, x, message)
             : norm_batch_by_sums(op, x, message);
}

GraphStatistics stored(const ForwardOpArguments& op, const at::Tensor& mean,
                       const at::Tensor& inv_std) {
  const at::Tensor none = at::zeros_like(mean);
  const at::Tensor scale = op.weight ? inv_std * *in_arithmetic(op.weight, op.x) : inv_std;
  const at::Tensor shift = op.bias ? *in_arithmetic(op.bias, op.x) : none;
  return {stored_statistics(mean, inv_std), at::stack({mean, none, scale, shift}).unsqueeze(0)};
}

// Slices are norm batches of one rank.
GraphStatistics stored_slices(const ForwardOpArguments& op, const Slicing& slicing) {
  const std::vector<at::Tensor> slices = slices_of(op.x, slicing, op.call.layer);
  std::vector<at::Tensor> statistics;
  std::vector<at::Tensor> coefficients;
  std::vector<Statistics> to_update;
  for (const at::Tensor& slice : slices) {
    const bool is_empty = slice.numel() == 0;
    const at::Tensor none = at::zeros({slice.size(1)}, arithmetic_options(slice));
    const Statistics of = is_empty ? Statistics{none, none, none} : statistics_of(slice);
    const GraphStatistics batch = stored(op, of.mean, (of.var + op.eps).rsqrt());
    statistics.push_back(batch.statistics);
    coefficients.push_back(batch.coefficients);
    if (!is_empty) to_update.push_back(of);
  }
  update_by_slices(op, slicing, to_update);
  return {at::cat(statistics), at::cat(coefficients)};
}

// The totals over the ranks of the gradient sums, and of the elements per channel [1].
struct Totals {
  GradientSums sums;
  at::Tensor count;
};

Totals total_of(const GradientSums& own, const at::Tensor& x, const ScopedCall& call,
                TensorMessage& message) {
  const std::int64_t channels = x.size(1);
  const CallLabel label{.layer = call.layer,
                        .scope = call.scope,
                        .kernels = "torch",
                        .direction = Direction::kBackward,
                        .channels = channels,
                        .dtype = dtype_name_of(x)};
  const at::Tensor sums =
      message.sum(label, elements_per_channel(x).expect_int(), {own.dy, own.dy_xmu});
  return {{sums.narrow(0, 0, channels), sums.narrow(0, channels, channels)},
          sums.narrow(0, 2 * channels, 1)};
}

// The gradient sums over this rank's samples, and the gradients of the parameters.
struct OwnGradients {
  GradientSums sums;
  at::Tensor dweight;
  at::Tensor dbias;
};

OwnGradients own_gradients(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                           const at::Tensor& mean, const at::Tensor& inv_std,
                           const WantedGradients& wanted) {
  OwnGradients own;
  if (has_synchronized_kernels(x) && x.numel() > 0) {
    std::tie(own.sums.dy, own.sums.dy_xmu, own.dweight, own.dbias) = at::batch_norm_backward_reduce(
        dy, x, mean, inv_std, weight, /*input_g=*/true, wanted.dweight, wanted.dbias);
  } else {
    const at::ScalarType type = mean.scalar_type();
    own.sums = gradient_sums(dy.to(type), x.to(type) - along_channels(x, mean));
    if (wanted.dweight) own.dweight = own.sums.dy_xmu * inv_std;
    own.dbias = own.sums.dy;
  }
  return own;
}

// x and dy in a layout of torch, and the weight in the type of the arithmetic.
struct BackwardTensorsOf {
  BackwardTensorsOf(const at::Tensor& given_dy, const at::Tensor& given_x,
                    const OptionalTensor& given_weight)
      : x(in_format_of(given_x, given_x)), weight(in_arithmetic(given_weight, given_x)) {
    TORCH_CHECK_NOT_IMPLEMENTED(uses_torch_kernels(given_dy), "dy: expected a dense tensor, got ",
                                given_dy.layout());
    dy = in_format_of(x, given_dy);
  }

  at::Tensor x;
  at::Tensor dy;
  OptionalTensor weight;
};

// Adds a slice's gradient to those of the slices before it.
void add(at::Tensor& total, const at::Tensor& of_slice) {
  total = total.defined() ? total + of_slice : of_slice;
}

}  // namespace

at::Tensor PortableStatistics::inv_std(const at::Tensor& x) const {
  return has_synchronized_kernels(x) ? spread : spread.rsqrt();
}

at::Tensor PortableStatistics::stored(const at::Tensor& x) const {
  return stored_statistics(mean, inv_std(x));
}

ForwardTensors portable_forward(const ForwardOpArguments& op) {
  return run_with_message(op.x, Direction::kForward, op.call, [&](TensorMessage& message) {
    static_cast<void>(checked(op, message.scope()));
    const at::Tensor x = in_format_of(op.x, op.x);
    at::Tensor y = memory_for_result(x);
    check_finite(op.x, message.exchange().get(), Direction::kForward, op.call);
    const NormBatch batch = norm_batch_of(op, x, message);
    const PortableStatistics& of = batch.statistics;
    y = apply(x, op.weight, op.bias, of, std::move(y));
    update(op, batch, x);
    return ForwardTensors{y, of.mean, of.spread, of.counts};
  });
}

BackwardTensors portable_backward(const BackwardOpArguments& op) {
  return run_with_message(op.x, Direction::kBackward, op.call, [&](TensorMessage& message) {
    const PortableStatistics statistics = portable_statistics_of(op);
    const BackwardTensorsOf of(op.dy, op.x, op.weight);
    check_finite(of.dy, message.exchange().get(), Direction::kBackward, op.call);
    const at::Tensor inv_std = statistics.inv_std(of.x);
    const OwnGradients own =
        own_gradients(of.dy, of.x, of.weight, statistics.mean, inv_std, op.wanted);
    const GradientSums totals = total_of(own.sums, of.x, op.call, message).sums;
    at::Tensor dx;
    if (op.wanted.dx && has_synchronized_kernels(of.x) && of.x.numel() > 0) {
      dx = at::batch_norm_backward_elemt(of.dy, of.x, statistics.mean, inv_std, of.weight,
                                         totals.dy, totals.dy_xmu, statistics.counts);
    } else if (op.wanted.dx) {
      const InputGradientValues values(totals, statistics.counts.sum(), inv_std, of.weight);
      dx = input_gradient(of.dy, of.x - along_channels(of.x, statistics.mean), values)
               .to(of.x.scalar_type());
    } else {
      dx = at::empty({0}, of.x.options());
    }
    const at::Tensor none = at::empty({0}, arithmetic_options(of.x));
    return BackwardTensors{
        dx, op.wanted.dweight ? own.dweight : none, op.wanted.dbias ? own.dbias : none, {}};
  });
}

at::Tensor portable_apply(const WithStatisticsOpArguments& op) {
  const at::Tensor x = in_format_of(op.x, op.x);
  return apply(x, op.weight, op.bias, portable_statistics_of(op), memory_for_result(x));
}

GraphStatistics portable_statistics(const ForwardOpArguments& op) {
  return run_with_message(op.x, Direction::kForward, op.call, [&](TensorMessage& message) {
    const Slicing slicing = checked(op, message.scope());
    check_finite(op.x, message.exchange().get(), Direction::kForward, op.call);
    if (message.scope().kind() == Scope::Kind::kSlices) return stored_slices(op, slicing);
    const at::Tensor x = in_format_of(op.x, op.x);
    const NormBatch batch = norm_batch_of(op, x, message);
    update(op, batch, x);
    return stored(op, batch.statistics.mean, batch.statistics.inv_std(x));
  });
}

GradientTensors portable_gradient_sums(const BackwardOpArguments& op) {
  return run_with_message(op.x, Direction::kBackward, op.call, [&](TensorMessage& message) {
    static_cast<void>(checked(op));
    check_finite(op.dy, message.exchange().get(), Direction::kBackward, op.call);
    const at::Tensor& all = op.statistics;
    check_slices(op.x, all);
    const std::vector<at::Tensor> x = op.x.chunk(all.size(0));
    const std::vector<at::Tensor> dy = op.dy.chunk(all.size(0));
    std::vector<at::Tensor> coefficients;
    OwnGradients sums;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const BackwardTensorsOf of(dy[i], x[i], op.weight);
      const at::Tensor statistics =
          all[static_cast<std::int64_t>(i)].to(arithmetic_options(of.x).dtype());
      const at::Tensor mean = statistics[0];
      const at::Tensor inv_std = statistics[2];
      const OwnGradients own = own_gradients(of.dy, of.x, of.weight, mean, inv_std,
                                             {.dx = true, .dweight = true, .dbias = true});
      const Totals totals = total_of(own.sums, of.x, op.call, message);
      const InputGradientValues values(totals.sums, totals.count, inv_std, of.weight);
      coefficients.push_back(
          at::stack({mean, at::zeros_like(mean), values.scale, values.mean_dy, values.slope}));
      add(sums.dweight, own.dweight);
      add(sums.dbias, own.dbias);
    }
    const at::Tensor none = at::empty({0}, arithmetic_options(op.x));
    return GradientTensors{at::stack(coefficients), op.wanted.dweight ? sums.dweight : none,
                           op.wanted.dbias ? sums.dbias : none};
  });
}

}  // namespace normscope::binding
