// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "normscope/torch/calls/checks.h"
#include "normscope/torch/calls/finite.h"
#include "normscope/torch/calls/recording.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

struct Normalized {
  at::Tensor y;
  std::optional<Statistics> statistics;  // wanted, and not empty
};

// The weight for torch's batch norm. Some of its kernels keep statistics in the type of the first
// parameter or buffer, and in x's if there are none: ones then stand for the weight.
OptionalTensor wide_weight(const ForwardOpArguments& op, const at::Tensor& x,
                           const OptionalTensor& running_mean) {
  const bool has_any = op.weight || op.bias || running_mean;
  if (has_any || !at::isReducedFloatingType(x.scalar_type())) return in_arithmetic(op.weight, x);
  return at::ones_symint({x.sym_size(1)}, arithmetic_options(x));
}

// Torch's batch norm of x, which has more than one element per channel or none.
//
// kUpdate: it updates the running statistics. kReturn: the statistics are returned instead. A
// recomputation must run the same operations as its forward, and change nothing.
enum class Then { kUpdate, kReturn, kNothing };
Normalized normalize_alone(const ForwardOpArguments& op, const at::Tensor& x, Then then) {
  const c10::SymInt count = elements_per_channel(x);
  const bool cudnn = at::globalContext().userEnabledCuDNN();
  const auto call = [&](const OptionalTensor& mean, const OptionalTensor& var, double momentum) {
    return at::batch_norm(x, wide_weight(op, x, mean), in_arithmetic(op.bias, x), mean, var,
                          /*training=*/true, momentum, op.eps, cudnn);
  };
  if (then == Then::kNothing || count == 0) return {call({}, {}, 0.0), std::nullopt};
  if (then == Then::kUpdate) {
    // torch saves the buffers for backward, which does not use them. Tensors with versions of their
    // own allow them to change until then.
    at::Tensor y =
        call(op.running.mean->variable_data(), op.running.var->variable_data(), *op.momentum);
    count_update(op.running);
    return {std::move(y), std::nullopt};
  }
  // ONNX has no batch norm that normalizes by its batch and takes buffers.
  if (is_left_to_torch(op)) return {call({}, {}, 0.0), statistics_of(x.detach())};
  // A momentum of 1 makes running statistics of this batch.
  const at::Tensor mean = at::zeros_symint({x.sym_size(1)}, arithmetic_options(x));
  const at::Tensor var = at::zeros_like(mean);
  at::Tensor y = call(mean, var, 1.0);
  if (repeats_a_forward()) return {std::move(y), std::nullopt};
  const at::Tensor n = at::scalar_tensor(c10::Scalar(count), mean.options());
  return {std::move(y), Statistics{mean, var * ((n - 1) / n), n}};
}

at::Tensor normalize(const ForwardOpArguments& op, const Slicing& slicing,
                     const std::vector<at::Tensor>& slices) {
  Then then = Then::kNothing;
  if (has_buffers(op.running, op.accumulated)) {
    // A graph must learn at run time whether it is a recomputation: update_buffers().
    const bool by_torch = updates_as_torch(op) && !slicing.pools() && !is_recorded_for_a_graph();
    then = by_torch ? Then::kUpdate : Then::kReturn;
  }
  std::vector<at::Tensor> outputs;
  std::vector<Statistics> statistics;
  for (const at::Tensor& slice : slices) {
    Normalized done = normalize_alone(op, slice, then);
    outputs.push_back(std::move(done.y));
    if (done.statistics) statistics.push_back(std::move(*done.statistics));
    if (slicing.slice_stats == SliceStats::kFirst) then = Then::kNothing;
  }
  const at::Tensor joined = outputs.size() == 1 ? outputs.front() : at::cat(outputs);
  at::Tensor y = joined.to(op.x.scalar_type());
  update_by_slices(op, slicing, statistics);
  return y;
}

}  // namespace

std::vector<at::Tensor> slices_of(const at::Tensor& x, const Slicing& slicing,
                                  std::string_view layer) {
  std::vector<at::Tensor> slices = {x};
  if (slicing.slices_wanted > 1) {
    const std::int64_t samples = x.sym_size(0).guard_int(__FILE__, __LINE__);
    // A graph may run under an autocast that joins no tensors of x's type.
    const bool is_widened = is_recorded_for_a_graph() && at::isReducedFloatingType(x.scalar_type());
    slices = (is_widened ? x.to(at::kFloat) : x).chunk(slice_count(samples, slicing.slices_wanted));
  }
  for (const at::Tensor& slice : slices) {
    if (elements_per_channel(slice) == 1) throw_one_value_per_channel(slice, layer);
  }
  return slices;
}

void update_by_slices(const ForwardOpArguments& op, const Slicing& slicing,
                      const std::vector<Statistics>& statistics) {
  if (statistics.empty()) return;
  const at::NoGradGuard no_grad;
  // A program of torch's ops cannot tell that it is recomputed, and updates again, as torch's layer
  // does.
  const auto update = is_left_to_torch(op) ? update_now : update_buffers;
  std::vector<Statistics> values = statistics;
  if (slicing.pools()) {
    values = {pooled(statistics)};
  } else if (slicing.slice_stats == SliceStats::kFirst) {
    values.resize(1);
  }
  for (const Statistics& of : values) {
    update(op.running, op.momentum, op.accumulated, of, /*may_be_too_small=*/false);
  }
}

at::Tensor normalize_on_this_rank(const ForwardOpArguments& op, const Scope& scope) {
  const ExchangeUse shown(Direction::kForward, op.call,
                          placement_of_messages(op.call, op.x).value_or(Placement{}));
  const Slicing slicing = checked(op, scope);
  check_finite(op.x, nullptr, Direction::kForward, op.call);
  const std::vector<at::Tensor> slices = slices_of(op.x, slicing, op.call.layer);
  // A later slice may raise; in a recomputation torch's kernel would update; that for CPUs
  // allocates memory after it has updated.
  const bool may_update_in_vain = slices.size() > 1 || repeats_a_forward() || op.x.is_cpu();
  if (!may_update_in_vain || !BufferCopies::can_be_made(op)) return normalize(op, slicing, slices);
  const BufferCopies copies(op);
  at::Tensor y = normalize(copies.in(op), slicing, slices);
  copies.write_back();
  return y;
}

}  // namespace normscope::binding
