// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/portable/statistics.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/var_mean.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
#include "normscope/torch/calls/recomputation.h"
#include "normscope/torch/calls/recording.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/tensors/pointwise.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

std::vector<std::int64_t> all_but_channels(const at::Tensor& x) {
  std::vector<std::int64_t> dims = {0};
  for (std::int64_t dim = 2; dim < x.dim(); ++dim) dims.push_back(dim);
  return dims;
}

using Updated = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The new values of the buffers; those that are absent are empty.
Updated updated(const at::Tensor& mean, const at::Tensor& var, const at::Tensor& count,
                const OptionalTensor& running_mean, const OptionalTensor& running_var,
                const OptionalTensor& updates, const OptionalTensor& accumulated,
                std::optional<double> momentum, bool may_be_too_small) {
  note_forward_in_graph("");
  const OptionalTensor copies[] = {copy_of(running_mean), copy_of(running_var), copy_of(updates),
                                   copy_of(accumulated)};
  update_buffers({copies[0], copies[1], copies[2]}, momentum, copies[3], {mean, var, count},
                 may_be_too_small);
  return {or_empty(copies[0], mean), or_empty(copies[1], mean), or_empty(copies[2], mean),
          or_empty(copies[3], mean)};
}

Updated updated_meta(const at::Tensor& mean, const at::Tensor&, const at::Tensor&,
                     const OptionalTensor& running_mean, const OptionalTensor& running_var,
                     const OptionalTensor& updates, const OptionalTensor& accumulated,
                     std::optional<double>, bool) {
  return {like_or_empty(running_mean, mean), like_or_empty(running_var, mean),
          like_or_empty(updates, mean), like_or_empty(accumulated, mean)};
}

// An op, which knows when the graph runs whether this is a recomputation.
void update_in_graph(const RunningTensors& running, std::optional<double> momentum,
                     const OptionalTensor& accumulated, const Statistics& statistics,
                     bool may_be_too_small) {
  static const auto op = op_named<decltype(updated)>("normscope::portable_update");
  const auto [mean, var, updates, moments] =
      op.call(statistics.mean, statistics.var, statistics.count, running.mean, running.var,
              running.updates, accumulated, momentum, may_be_too_small);
  set_buffer(running.mean, mean);
  set_buffer(running.var, var);
  set_buffer(running.updates, updates);
  set_buffer(accumulated, moments);
}

// Hides operations from autograd and from modes of torch.
struct Unseen {
  at::NoGradGuard autograd;
  c10::impl::ExcludeDispatchKeyGuard modes{c10::python_ks};
};

// Whether this is a real tensor in a call with fake ones: torch writes nothing, but would count a
// write.
bool is_left_alone(const at::Tensor& buffer) {
  return !buffer.key_set().has(c10::DispatchKey::Python) &&
         !buffer.key_set().has(c10::DispatchKey::Functionalize) &&
         is_in_mode(c10::impl::TorchDispatchModeKey::FAKE);
}

}  // namespace

void add_moments(const at::Tensor& moments, const Statistics& statistics) {
  const at::Tensor sums = sums_of(statistics);
  const std::int64_t channels = statistics.mean.size(0);
  moments.narrow(0, 0, channels).add_(sums.narrow(0, 0, channels));
  moments.narrow(0, kLimbs * channels, channels).add_(sums.narrow(0, channels, channels));
  moments.narrow(0, limbs_size(channels) + kCount, 1).add_(statistics.count);
}

at::Tensor sums_in(const at::Tensor& moments) {
  const std::int64_t size = moments.size(0) - kHeaderSize;
  const at::Tensor sums =
      moments.narrow(0, 0, size).view({kSums, kLimbs, size / (kSums * kLimbs)}).sum(1).flatten();
  return at::cat({sums, moments.narrow(0, size + kCount, 1)});
}

at::Tensor in_format_of(const at::Tensor& x, const at::Tensor& tensor) {
  return tensor.contiguous(x.suggest_memory_format());
}

Statistics statistics_of(const at::Tensor& x) {
  const at::TensorOptions options = arithmetic_options(x);
  const at::Tensor count = at::scalar_tensor(c10::Scalar(elements_per_channel(x)), options);
  if (at::isReducedFloatingType(x.scalar_type()) && !x.is_cpu()) {
    // Keeps its sums in float32, and needs no copy of x in float32.
    const auto [y, mean, inv_std] =
        at::native_batch_norm(x, {}, {}, {}, {}, /*training=*/true, 0.0, kNoElements);
    if (mean.scalar_type() == at::kFloat) return {mean, inv_std.square().reciprocal(), count};
  }
  const auto [var, mean] =
      at::var_mean(x.to(options.dtype()), all_but_channels(x), /*correction=*/0);
  return {mean, var, count};
}

at::Tensor sums_of(const Statistics& statistics) {
  const at::Tensor mean = statistics.mean.to(at::kDouble);
  const at::Tensor n = statistics.count.to(at::kDouble).reshape({1});
  return at::cat({mean * n, (statistics.var.to(at::kDouble) + mean * mean) * n});
}

Statistics statistics_of_sums(const at::Tensor& sums, const at::TensorOptions& options) {
  const c10::SymInt channels = (sums.sym_size(0) - 1) / 2;
  const at::Tensor n = sums.narrow_symint(0, 2 * channels, 1);
  // Without elements the statistics are 0. If they were NaN, so would be the gradients: 0 * NaN.
  const at::Tensor divisor = n.clamp_min(1);
  const at::Tensor mean = sums.narrow_symint(0, 0, channels) / divisor;
  const at::Tensor var = sums.narrow_symint(0, channels, channels) / divisor - mean * mean;
  return {mean.to(options.dtype()), var.clamp_min(0).to(options.dtype()), n.to(options.dtype())};
}

Statistics merged(const at::Tensor& means, const at::Tensor& vars, const at::Tensor& counts) {
  const at::Tensor count = counts.sum();
  const at::Tensor weights = counts / count;
  const at::Tensor mean = (weights * means).sum(0);
  const at::Tensor from_mean = means - mean;
  const at::Tensor var = (weights * at::addcmul(vars, from_mean, from_mean)).sum(0);
  return {mean, var, count};
}

Statistics pooled(const std::vector<Statistics>& parts) {
  std::vector<at::Tensor> means;
  std::vector<at::Tensor> vars;
  std::vector<at::Tensor> counts;
  for (const Statistics& part : parts) {
    means.push_back(part.mean);
    vars.push_back(part.var);
    counts.push_back(part.count.reshape({1}));
  }
  return merged(at::stack(means), at::stack(vars), at::stack(counts));
}

at::Tensor stored_statistics(const at::Tensor& mean, const at::Tensor& inv_std) {
  const at::Tensor wide = mean.to(at::kDouble);
  return at::stack({wide, at::zeros_like(wide), inv_std.to(at::kDouble)}).unsqueeze(0);
}

at::Tensor affine(at::Tensor y, const OptionalTensor& weight, const OptionalTensor& bias) {
  if (weight) y = y * along_channels(y, *weight);
  if (bias) y = y + along_channels(y, *bias);
  return y;
}

GradientSums gradient_sums(const at::Tensor& dy, const at::Tensor& centered) {
  const std::vector<std::int64_t> dims = all_but_channels(dy);
  return {dy.sum(dims), (dy * centered).sum(dims)};
}

InputGradientValues::InputGradientValues(const GradientSums& totals, const at::Tensor& count,
                                         const at::Tensor& inv_std, const OptionalTensor& weight)
    : scale(weight ? *weight * inv_std : inv_std),
      mean_dy(totals.dy / count),
      slope(inv_std * inv_std * (totals.dy_xmu / count)) {}

at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& centered,
                          const InputGradientValues& values) {
  const auto of = [&](const at::Tensor& each) { return along_channels(dy, each); };
  return pointwise::input_gradient(dy, centered, of(values.mean_dy), of(values.slope),
                                   of(values.scale));
}

// A graph learns this when it runs: see update_in_graph().
bool repeats_a_forward() { return batch_was_counted() && !is_recorded_for_a_graph(); }

bool has_buffers(const RunningTensors& running, const OptionalTensor& accumulated) {
  return running.mean || running.updates || accumulated;
}

bool updates_buffers(const RunningTensors& running, const OptionalTensor& accumulated) {
  return !repeats_a_forward() && has_buffers(running, accumulated);
}

OptionalTensor in_arithmetic(const OptionalTensor& parameter, const at::Tensor& x) {
  const auto type = arithmetic_options(x).dtype();
  if (!parameter || parameter->dtype() == type) return parameter;
  return parameter->to(type);
}

bool updates_as_torch(const ForwardOpArguments& op) {
  return op.running.mean && op.momentum && !op.accumulated &&
         op.running.mean->dtype() == arithmetic_options(op.x).dtype() &&
         op.running.var->dtype() == op.running.mean->dtype();
}

bool BufferCopies::can_be_made(const ForwardOpArguments& op) {
  return has_buffers(op.running, op.accumulated) && !is_recorded_for_a_graph() &&
         !op.x.key_set().has(c10::DispatchKey::Python);
}

BufferCopies::BufferCopies(const ForwardOpArguments& op)
    : buffers_{op.running.mean, op.running.var, op.running.updates, op.accumulated} {
  const Unseen unseen;
  std::ranges::transform(buffers_, copies_.begin(), copy_of);
}

ForwardOpArguments BufferCopies::in(const ForwardOpArguments& op) const {
  return op.with(op.weight, {copies_[0], copies_[1], copies_[2]}, copies_[3]);
}

void BufferCopies::write_back() const {
  if (repeats_a_forward()) return;
  const Unseen unseen;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (buffers_[i]) buffers_[i]->copy_(*copies_[i]);
  }
}

void count_update(const RunningTensors& running) {
  const OptionalTensor& updates = running.updates;
  if (updates && !is_left_alone(*updates)) updates->add_(1);
}

void update_buffers(const RunningTensors& running, std::optional<double> momentum,
                    const OptionalTensor& accumulated, const Statistics& statistics,
                    bool may_be_too_small) {
  if (!updates_buffers(running, accumulated)) return;
  if (running.mean && is_left_alone(*running.mean)) return;
  const auto update = is_recorded_for_a_graph() ? update_in_graph : update_now;
  update(running, momentum, accumulated, statistics, may_be_too_small);
}

void update_now(const RunningTensors& running, std::optional<double> momentum,
                const OptionalTensor& accumulated, const Statistics& statistics,
                bool may_be_too_small) {
  at::Tensor is_large_enough;
  if (may_be_too_small) is_large_enough = statistics.count.reshape({}) >= 2;
  const auto if_large_enough = [&](const at::Tensor& value, const at::Tensor& otherwise) {
    return may_be_too_small ? at::where(is_large_enough, value, otherwise) : value;
  };
  // All values are computed before the first is written: if memory runs out, nothing has changed.
  std::vector<std::pair<at::Tensor, at::Tensor>> writes;
  OptionalTensor updates = running.updates;
  if (updates && !is_left_alone(*updates)) {
    updates = if_large_enough(*running.updates + 1, *running.updates);
    writes.emplace_back(*running.updates, *updates);
  }
  // As in torch, running statistics do not change if nothing counts a cumulative average's updates.
  if (running.mean && (momentum || updates)) {
    const at::TensorOptions options = statistics.mean.options();
    const at::Tensor weight = momentum ? at::scalar_tensor(*momentum, options)
                                       : updates->to(at::kLong).to(options.dtype()).reciprocal();
    const auto move = [&](const at::Tensor& buffer, const at::Tensor& value) {
      const at::Tensor now = buffer.to(value.scalar_type());
      writes.emplace_back(buffer, if_large_enough(now + (value - now) * weight, now));
    };
    move(*running.mean, statistics.mean);
    move(*running.var, statistics.var * (statistics.count / (statistics.count - 1)));
  }
  if (accumulated) {
    const at::Tensor sum = accumulated->clone();
    add_moments(sum, statistics);
    writes.emplace_back(*accumulated, if_large_enough(sum, *accumulated));
  }
  for (const auto& [buffer, value] : writes) buffer.copy_(value);
}

TORCH_LIBRARY_IMPL(normscope, CompositeExplicitAutograd, m) { m.impl("portable_update", &updated); }
TORCH_LIBRARY_IMPL(normscope, Meta, m) { m.impl("portable_update", &updated_meta); }

}  // namespace normscope::binding
