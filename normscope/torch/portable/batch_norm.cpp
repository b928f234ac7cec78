// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/portable/batch_norm.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm.h>
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
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "normscope/torch/groups/registry.h"
#include "normscope/torch/ops/activation.h"
#include "normscope/torch/ops/arguments.h"
#include "normscope/torch/ops/backend_call.h"
#include "normscope/torch/ops/finite.h"
#include "normscope/torch/ops/graph.h"
#include "normscope/torch/ops/saved_call.h"
#include "normscope/torch/portable/graph.h"
#include "normscope/torch/portable/messages.h"
#include "normscope/torch/portable/path.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

// Above this number of ranks, they add float64 sums instead of gathering statistics: the gathered
// rows would take longer than the cancellation of the sums costs.
constexpr std::int64_t kMostGathered = 64;

// ---- Alone, and slices
// ----------------------------------------------------------------------------

// torch's kernels take parameters and running statistics in the type of x's arithmetic. (Some also
// take x's type, but not on all devices.)
OptionalTensor in_arithmetic(const OptionalTensor& parameter, const at::Tensor& x) {
  const auto type = arithmetic_options(x).dtype();
  if (!parameter || parameter->dtype() == type) return parameter;
  return parameter->to(type);
}

// Whether torch's batch norm updates the running statistics as this call shall.
bool updates_as_torch(const ForwardOpArguments& op) {
  return op.running.mean && op.momentum && !op.accumulated &&
         op.running.mean->dtype() == arithmetic_options(op.x).dtype() &&
         op.running.var->dtype() == op.running.mean->dtype();
}

struct Normalized {
  at::Tensor y;
  std::optional<Statistics> statistics;  // wanted, and not empty
};

// Torch's batch norm of x, which has more than one element per channel or none.
//
// kUpdate: it updates the running statistics. kReturn: the statistics are returned instead. In a
// recomputation, torch must save as many tensors as in the forward, but nothing may change: both
// then work on tensors that are thrown away.
enum class Then { kUpdate, kReturn, kNothing };
Normalized normalize_alone(const ForwardOpArguments& op, const at::Tensor& x, Then then) {
  const c10::SymInt count = x.sym_numel() / x.sym_size(1);
  const bool cudnn = at::globalContext().userEnabledCuDNN();
  const auto call = [&](const OptionalTensor& mean, const OptionalTensor& var, double momentum) {
    return at::batch_norm(x, in_arithmetic(op.weight, x), in_arithmetic(op.bias, x), mean, var,
                          /*training=*/true, momentum, op.eps, cudnn);
  };
  if (then == Then::kNothing || count == 0) return {call({}, {}, 0.0), std::nullopt};
  const bool again = runs_inside_a_backward();
  if (then == Then::kUpdate) {
    if (again) return {call(op.running.mean->clone(), op.running.var->clone(), *op.momentum), {}};
    at::Tensor y = call(op.running.mean, op.running.var, *op.momentum);
    count_update(op.running);
    return {std::move(y), std::nullopt};
  }
  // A momentum of 1 makes running statistics of this batch.
  const at::Tensor mean = at::zeros_symint({x.sym_size(1)}, arithmetic_options(x));
  const at::Tensor var = at::zeros_like(mean);
  at::Tensor y = call(mean, var, 1.0);
  if (again) return {std::move(y), std::nullopt};
  const at::Tensor n = at::scalar_tensor(c10::Scalar(count), mean.options());
  return {std::move(y), Statistics{mean, var * ((n - 1) / n), n}};
}

void update_by_all(const ForwardOpArguments& op, const std::vector<Statistics>& statistics) {
  const at::NoGradGuard no_grad;
  for (const Statistics& of : statistics) {
    update_buffers(op.running, op.momentum, op.accumulated, of, /*may_be_empty=*/false);
  }
}

at::Tensor normalize_on_this_rank(const ForwardOpArguments& op, const Slicing& slicing) {
  const bool pools = slicing.slices_wanted > 1 && slicing.slice_stats == SliceStats::kPooled;
  Then then = Then::kNothing;
  if (op.running.mean || op.running.num_batches_tracked || op.accumulated) {
    // A graph must learn at run time whether it is a recomputation: update_buffers().
    const bool by_torch = updates_as_torch(op) && !pools && !is_recorded_for_a_graph();
    then = by_torch ? Then::kUpdate : Then::kReturn;
  }
  std::vector<at::Tensor> slices = {op.x};
  if (slicing.slices_wanted > 1) {
    const std::int64_t samples = op.x.sym_size(0).guard_int(__FILE__, __LINE__);
    slices = op.x.chunk(slice_count(samples, slicing.slices_wanted));
  }
  for (const at::Tensor& slice : slices) {
    if (slice.sym_numel() == slice.sym_size(1)) throw_one_value_per_channel(slice);
  }
  std::vector<at::Tensor> outputs;
  std::vector<Statistics> statistics;
  for (const at::Tensor& slice : slices) {
    Normalized done = normalize_alone(op, slice, then);
    outputs.push_back(std::move(done.y));
    if (done.statistics) statistics.push_back(std::move(*done.statistics));
    if (slicing.slice_stats == SliceStats::kFirst) then = Then::kNothing;
  }
  update_by_all(op, pools && !statistics.empty() ? std::vector{pooled(statistics)} : statistics);
  return outputs.size() == 1 ? outputs.front() : at::cat(outputs);
}

// ---- Ranks that share statistics
// ------------------------------------------------------------------

CallLabel label_of(const ForwardOpArguments& op) {
  return {
      .layer = op.call.layer,
      .scope = op.call.scope,
      .kernels = "torch",
      .direction = Direction::kForward,
      .channels = op.x.size(1),
      .backward = op.needs_backward.value_or(false) ? BackwardNeeded::kYes : BackwardNeeded::kNo,
      .eps = op.eps,
      .momentum = op.momentum.value_or(0.0)};
}

// The sums of all ranks in place of their statistics, for many ranks.
Statistics statistics_by_sums(TensorMessage& message, const CallLabel& label, std::int64_t count,
                              const std::optional<Statistics>& own, const at::Tensor& x) {
  const at::TensorOptions wide = float64_options(x);
  const std::int64_t channels = x.size(1);
  at::Tensor sums = at::zeros({2 * channels + 1}, wide);
  if (own) {
    const at::Tensor mean = own->mean.to(wide.dtype());
    const at::Tensor square = own->var.to(wide.dtype()) + mean * mean;
    const at::Tensor n = own->count.to(wide.dtype()).reshape({1});
    sums = at::cat({mean * n, square * n, n});
  }
  return statistics_of_sums(message.sum(label, count, sums), arithmetic_options(x));
}

at::Tensor apply(const at::Tensor& given, const OptionalTensor& given_weight,
                 const OptionalTensor& given_bias, const at::Tensor& mean, const at::Tensor& spread,
                 double eps) {
  const at::Tensor x = in_torch_layout(given);
  const OptionalTensor weight = in_arithmetic(given_weight, x);
  const OptionalTensor bias = in_arithmetic(given_bias, x);
  if (x.numel() == 0) return at::empty_like(x);
  if (has_synchronized_kernels(x)) return at::batch_norm_elemt(x, weight, bias, mean, spread, eps);
  return std::get<0>(
      at::native_batch_norm(x, weight, bias, mean, spread, /*training=*/false, 0.0, eps));
}

at::Tensor apply_meta(const at::Tensor& x, const OptionalTensor&, const OptionalTensor&,
                      const at::Tensor&, const at::Tensor&, double) {
  return empty_output(x);
}

// By torch's synchronized kernels, which also update the running statistics.
PortableTensors forward_by_synchronized_kernels(const ForwardOpArguments& op, const at::Tensor& x,
                                                TensorMessage& message) {
  const std::int64_t count = elements_per_channel(x);
  const std::int64_t channels = x.size(1);
  const at::TensorOptions options = arithmetic_options(x);
  const auto [own_mean, own_inv_std] =
      count > 0 ? at::batch_norm_stats(x, op.eps)
                : std::tuple(at::zeros({channels}, options), at::ones({channels}, options));
  const auto [all, counts] = message.gather(label_of(op), count, {own_mean, own_inv_std});
  const at::Tensor elements = all.select(1, 2 * channels);
  const bool updates = updates_buffers(op.running, op.accumulated);
  const bool as_torch = updates && count > 0 && updates_as_torch(op);
  at::Tensor batch_mean;
  at::Tensor batch_var;
  if (updates && !as_torch) {
    batch_mean = at::zeros({channels}, options);
    batch_var = at::zeros({channels}, options);
  }
  const auto or_none = [](const at::Tensor& tensor) { return defined_or_none(tensor); };
  const auto [mean, inv_std] = at::batch_norm_gather_stats_with_counts(
      x, all.narrow(1, 0, channels), all.narrow(1, channels, channels),
      as_torch ? op.running.mean : or_none(batch_mean),
      as_torch ? op.running.var : or_none(batch_var), as_torch ? *op.momentum : 1.0, op.eps,
      elements);
  if (as_torch) {
    count_update(op.running);
  } else if (updates) {
    const at::Tensor total = elements.sum();
    update_buffers(op.running, op.momentum, op.accumulated,
                   {batch_mean, batch_var * ((total - 1) / total), total},
                   /*may_be_empty=*/count == 0);
  }
  return {apply(x, op.weight, op.bias, mean, inv_std, op.eps), mean, inv_std, counts};
}

PortableTensors forward_by_sums(const ForwardOpArguments& op, const at::Tensor& x,
                                TensorMessage& message) {
  const std::int64_t count = elements_per_channel(x);
  const std::int64_t channels = x.size(1);
  const at::TensorOptions options = arithmetic_options(x);
  std::optional<Statistics> own;
  if (count > 0) own = statistics_of(x);
  Statistics all;
  if (message.ranks() > kMostGathered) {
    all = statistics_by_sums(message, label_of(op), count, own, x);
  } else {
    const at::Tensor none = own ? at::Tensor() : at::zeros({channels}, options);
    const auto [rows, counts] =
        message.gather(label_of(op), count, {own ? own->mean : none, own ? own->var : none});
    all = merged(rows.narrow(1, 0, channels), rows.narrow(1, channels, channels),
                 rows.narrow(1, 2 * channels, 1));
  }
  update_buffers(op.running, op.momentum, op.accumulated, all, /*may_be_empty=*/count == 0);
  const bool by_inv_std = has_synchronized_kernels(x);
  const at::Tensor spread = by_inv_std ? (all.var + op.eps).rsqrt() : all.var;
  const at::Tensor total = all.count.reshape({1});
  return {apply(x, op.weight, op.bias, all.mean, spread, op.eps), all.mean, spread,
          by_inv_std ? total.to(at::kInt) : total};
}

PortableTensors forward(const ForwardOpArguments& op) {
  TensorMessage message(Direction::kForward, op.call, op.x);
  const at::Tensor x = prepare_or_fail(message.exchange(), [&] {
    static_cast<void>(checked(op, message.scope()));
    return in_torch_layout(op.x);
  });
  check_finite(op.x, message.exchange().get(), Direction::kForward, op.call);
  PortableTensors result;
  run_as_torch(op.x, message.exchange(), [&] {
    result = has_synchronized_kernels(x) && message.ranks() <= kMostGathered
                 ? forward_by_synchronized_kernels(op, x, message)
                 : forward_by_sums(op, x, message);
  });
  return result;
}

// ---- Backward
// -------------------------------------------------------------------------------------

GradientTensors backward(const PortableBackwardArguments& given) {
  TensorMessage message(Direction::kBackward, given.call, given.x);
  const at::Tensor x = in_torch_layout(given.x);
  const at::Tensor dy = prepare_or_fail(message.exchange(), [&] {
    TORCH_CHECK_NOT_IMPLEMENTED(uses_torch_kernels(given.dy), "dy: expected a dense tensor, got ",
                                given.dy.layout());
    return given.dy.contiguous(x.suggest_memory_format());
  });
  const OptionalTensor weight = in_arithmetic(given.weight, x);
  const PortableBackwardArguments op{
      dy, x, weight, given.mean, given.wanted, given.call, given.spread, given.counts, given.eps};
  check_finite(dy, message.exchange().get(), Direction::kBackward, op.call);
  const bool synchronized = has_synchronized_kernels(x);
  const bool is_empty = x.numel() == 0;
  GradientSums own;
  at::Tensor dweight;
  at::Tensor dbias;
  if (synchronized && !is_empty) {
    std::tie(own.dy, own.dy_xmu, dweight, dbias) = at::batch_norm_backward_reduce(
        dy, x, op.mean, op.spread, op.weight, /*input_g=*/true, op.wanted.dweight, op.wanted.dbias);
  } else {
    own = gradient_sums_of(op);
    if (op.wanted.dweight) dweight = own.dy_xmu * inv_std_of(x, op.spread, op.eps);
    dbias = own.dy;
  }
  GradientSums totals;
  const std::int64_t channels = x.size(1);
  run_as_torch(x, message.exchange(), [&] {
    const CallLabel label{.layer = op.call.layer,
                          .scope = op.call.scope,
                          .kernels = "torch",
                          .direction = Direction::kBackward,
                          .channels = channels};
    const at::Tensor sums =
        message.sum(label, elements_per_channel(x), at::cat({own.dy, own.dy_xmu}));
    totals = {sums.narrow(0, 0, channels), sums.narrow(0, channels, channels)};
  });
  at::Tensor dx = at::empty({0}, x.options());
  if (op.wanted.dx) {
    dx = synchronized && !is_empty
             ? at::batch_norm_backward_elemt(dy, x, op.mean, op.spread, op.weight, totals.dy,
                                             totals.dy_xmu, op.counts)
             : input_gradient_of(op, totals);
  }
  const at::Tensor none = at::empty({0}, arithmetic_options(x));
  return {dx, op.wanted.dweight ? dweight : none, op.wanted.dbias ? dbias : none};
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

// ---- Autograd
// -------------------------------------------------------------------------------------

const c10::TypedOperatorHandle<PortableForwardOp>& forward_op() {
  static const auto op = op_named<PortableForwardOp>("normscope::portable_forward");
  return op;
}

const c10::TypedOperatorHandle<PortableBackwardOp>& backward_op() {
  static const auto op = op_named<PortableBackwardOp>("normscope::portable_backward");
  return op;
}

// A backward that can be differentiated once more, by the op that all paths share.
class PortableBackward : public ::torch::autograd::Function<PortableBackward> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const PortableBackwardArguments& op) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [dx, dweight, dbias] = op.pass_to(backward_op());
    const at::Tensor mean = op.mean.to(float64_options(x).dtype());
    const at::Tensor inv_std = inv_std_of(x, op.spread, op.eps).to(mean.scalar_type());
    const at::Tensor statistics = at::stack({mean, at::zeros_like(mean), inv_std}).unsqueeze(0);
    context->save_for_backward({dy, x, weight.value_or(at::Tensor()), statistics});
    context->set_materialize_grads(false);
    save(context, op.call);
    return {dx, dweight, dbias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    static const auto op = op_named<DoubleBackwardOp>("normscope::batch_norm_double_backward");
    const variable_list saved = context->get_saved_variables();
    const OptionalTensor grad_dx = defined_or_none(gradients[0]);
    const OptionalTensor grad_dweight = defined_or_none(gradients[1]);
    const OptionalTensor grad_dbias = defined_or_none(gradients[2]);
    const OptionalTensor weight = defined_or_none(saved[2]);
    const DoubleBackwardOpArguments arguments{
        grad_dx,  grad_dweight, grad_dbias, saved[0],
        saved[1], weight,       saved[3],   call_saved_in(*context)};
    const auto [grad_dy, grad_x, grad_weight] = arguments.pass_to(op);
    return {grad_dy, grad_x, weight ? grad_weight : at::Tensor(), at::Tensor()};
  }
};

PortableTensors forward_below_autograd(const ForwardOpArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const bool in_graph = op.decompose.has_value() && is_recorded_for_a_graph();
  return in_graph ? portable_forward_in_graph(op) : op.pass_to(forward_op());
}

class PortableBatchNorm : public ::torch::autograd::Function<PortableBatchNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const ForwardOpArguments& op) {
    const auto [y, mean, spread, counts] = forward_below_autograd(op);
    context->save_for_backward({x, weight.value_or(at::Tensor()), mean, spread, counts});
    context->saved_data["eps"] = op.eps;
    save_flags(context, x, weight, bias, op.decompose.value_or(false) ? kDecomposes : 0);
    save(context, op.call);
    return {y};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const std::int64_t flags = flags_saved_in(*context);
    const WantedGradients wanted = wanted_by(flags);
    const OptionalTensor weight = defined_or_none(saved[1]);
    const PortableBackwardArguments op{
        gradients[0], saved[0], weight,
        saved[2],     wanted,   call_saved_in(*context),
        saved[3],     saved[4], context->saved_data.at("eps").toDouble()};
    variable_list results;
    if ((flags & kDecomposes) != 0 && is_recorded_for_a_graph()) {
      const auto [dx, dweight, dbias] = portable_backward_in_graph(op);
      results = {dx, dweight, dbias};
    } else if (at::GradMode::is_enabled()) {
      results = PortableBackward::apply(op.dy, op.x, op.weight, op);
    } else {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const auto [dx, dweight, dbias] = op.pass_to(backward_op());
      results = {dx, dweight, dbias};
    }
    const at::Tensor none;
    return {wanted.dx ? results[0] : none, wanted.dweight ? results[1] : none,
            wanted.dbias ? results[2] : none, none};
  }
};

}  // namespace

at::Tensor inv_std_of(const at::Tensor& x, const at::Tensor& spread, double eps) {
  return has_synchronized_kernels(x) ? spread : (spread + eps).rsqrt();
}

GradientSums gradient_sums_of(const PortableBackwardArguments& op) {
  const at::ScalarType type = op.mean.scalar_type();
  const at::Tensor dy = op.dy.to(type);
  const at::Tensor centered = op.x.to(type) - along_channels(op.x, op.mean);
  return {sum_per_channel(dy), sum_per_channel(dy * centered)};
}

at::Tensor input_gradient_of(const PortableBackwardArguments& op, const GradientSums& totals) {
  const at::Tensor inv_std = inv_std_of(op.x, op.spread, op.eps);
  const at::Tensor count = op.counts.sum();
  const at::Tensor scale = op.weight ? *op.weight * inv_std : inv_std;
  const at::Tensor slope = inv_std * inv_std * (totals.dy_xmu / count);
  const auto of = [&](const at::Tensor& values) { return along_channels(op.x, values); };
  const at::Tensor centered = op.x - of(op.mean);
  return ((op.dy - of(totals.dy / count) - centered * of(slope)) * of(scale))
      .to(op.x.scalar_type());
}

std::tuple<at::Tensor, at::Tensor> portable_forward(const ForwardOpArguments& op) {
  const Scope scope = parsed_scope_or_fail(op.call);
  const ActivationFunction activation =
      parsed_activation(op.activation.activation, op.activation.negative_slope);
  at::Tensor y;
  if (scope.is_of_one_rank() || !has_peers(op.call.group_name)) {
    const ExchangeUse shown(Direction::kForward, op.call,
                            placement_of_messages(op.call, op.x).value_or(Placement{}));
    const Slicing slicing = checked(op, scope);
    check_finite(op.x, nullptr, Direction::kForward, op.call);
    y = normalize_on_this_rank(op, slicing);
  } else if (op.needs_backward.value_or(false)) {
    y = PortableBatchNorm::apply(op.x, op.weight, op.bias, op)[0];
  } else {
    y = std::get<0>(forward_below_autograd(op));
  }
  if (op.activation.residual) y = y + *op.activation.residual;
  return {activated(activation, y), at::empty({0}, op.x.options())};
}

TORCH_LIBRARY_IMPL(normscope, CompositeExplicitAutograd, m) {
  m.impl("portable_forward", &Taken<PortableForwardOp, &forward>::call);
  m.impl("portable_backward", &Taken<PortableBackwardOp, &backward>::call);
  m.impl("portable_apply", &apply);
}

TORCH_LIBRARY_IMPL(normscope, Meta, m) {
  m.impl("portable_forward", &Taken<PortableForwardOp, &forward_meta>::call);
  m.impl("portable_backward", &Taken<PortableBackwardOp, &backward_meta>::call);
  m.impl("portable_apply", &apply_meta);
}

}  // namespace normscope::binding
