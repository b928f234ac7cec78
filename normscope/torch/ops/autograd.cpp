// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/ops/activation.h"
#include "normscope/torch/ops/arguments.h"
#include "normscope/torch/ops/graph.h"
#include "normscope/torch/ops/operators.h"
#include "normscope/torch/ops/saved_call.h"
#include "normscope/torch/ops/scope_changes.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/tensors/kernels_in_use.h"

namespace normscope::binding::autograd {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

const c10::TypedOperatorHandle<BackwardOp>& backward_op() {
  static const auto op = op_named<BackwardOp>("normscope::batch_norm_backward");
  return op;
}

// Only reverse mode is implemented: without this check, forward-mode derivatives would be zeros.
void check_no_forward_gradient(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor._fw_grad(/*level=*/0).defined(),
      "normscope.batch_norm: expected no forward-mode derivative in training, got one; use reverse "
      "mode (torch.autograd.grad, torch.autograd.functional.jvp), or eval()");
}

// Whether a backward follows a forward of these inputs.
bool needs_backward(const at::Tensor& x,
                    std::initializer_list<std::reference_wrapper<const OptionalTensor>> others) {
  check_no_forward_gradient(x);
  bool one_requires_grad = x.requires_grad();
  for (const OptionalTensor& other : others) {
    if (!other) continue;
    check_no_forward_gradient(*other);
    one_requires_grad = one_requires_grad || other->requires_grad();
  }
  return at::GradMode::is_enabled() && one_requires_grad;
}

std::tuple<at::Tensor, at::Tensor> below_autograd(const ForwardOpArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const bool in_graph = op.graph.has_value() && is_recorded_for_a_graph();
  if (in_graph && !op.activation.activates()) return forward_in_graph(op);
  static const auto next = op_named<ForwardOp>("normscope::batch_norm_forward");
  return op.pass_to(next);
}

class BatchNormBackward : public ::torch::autograd::Function<BatchNormBackward> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const BackwardOpArguments& op) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [dx, dweight, dbias, none] = op.pass_to(backward_op());
    save_for_double_backward(context, dy, x, weight, op.statistics, op.call);
    return {dx, dweight, dbias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return double_backward_of(*context, gradients);
  }
};

// Gradients that cannot be differentiated again: an attempt is an error, and does not give zeros.
class BatchNormDoubleBackward : public ::torch::autograd::Function<BatchNormDoubleBackward> {
 public:
  static variable_list forward(AutogradContext*, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const DoubleBackwardOpArguments& op) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [grad_dy, grad_x, grad_weight] = op.pass_to(double_backward_op());
    return {grad_dy, grad_x, grad_weight};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "normscope.batch_norm: expected at most two differentiations, got a third");
  }
};

// Recomputes z of a forward, with a graph. Needed if a backward is itself differentiated.
class NormalizedAgain : public ::torch::autograd::Function<NormalizedAgain> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const at::Tensor& statistics, const ScopedCall& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({x, weight.value_or(at::Tensor()), statistics});
    save_flags(context, x, weight, bias, 0);
    save(context, call);
    return WithStatisticsOpArguments{x, weight, bias, statistics}.pass_to(with_statistics_op());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const OptionalTensor weight = defined_or_none(saved[1]);
    const WantedGradients wanted = wanted_by(flags_saved_in(*context));
    const BackwardOpArguments op{gradients[0], saved[0], weight,
                                 saved[2],     wanted,   call_saved_in(*context)};
    const auto [dx, dweight, dbias, dresidual] = op.pass_to(backward_op());
    const at::Tensor none;
    return {wanted.dx ? dx : none, wanted.dweight ? dweight : none, wanted.dbias ? dbias : none,
            none, none};
  }
};

// The layer, and the activation that may follow it.
class BatchNorm : public ::torch::autograd::Function<BatchNorm> {
 public:
  // Tensors that get gradients are separate arguments, because torch looks for them there. The
  // statistics are no output: compiled autograd takes no outputs that are not differentiable.
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& residual, const ForwardOpArguments& op,
                               at::Tensor* statistics) {
    at::Tensor y;
    std::tie(y, *statistics) = below_autograd(op);
    variable_list saved{x, weight.value_or(at::Tensor()), *statistics};
    if (op.activation.activates()) {
      saved.push_back(bias.value_or(at::Tensor()));
      saved.push_back(residual ? y : at::Tensor());
      context->saved_data["activation"] = std::string(op.activation.activation);
      context->saved_data["negative_slope"] = op.activation.negative_slope;
    }
    context->save_for_backward(std::move(saved));
    save_flags(
        context, x, weight, bias,
        (requires_grad(residual) ? kWantsDResidual : 0) | (op.decomposes() ? kDecomposes : 0));
    save(context, op.call);
    return {y};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ScopedCall call = call_saved_in(*context);
    return or_tell_peers(call, [&] { return gradients_of(*context, call, gradients); });
  }

 private:
  static variable_list gradients_of(const AutogradContext& context, const ScopedCall& call,
                                    const variable_list& gradients) {
    const variable_list saved = context.get_saved_variables();
    const std::int64_t flags = flags_saved_in(context);
    const OptionalTensor weight = defined_or_none(saved[1]);
    const bool activates = saved.size() > 3;
    const OptionalTensor bias = activates ? defined_or_none(saved[3]) : kNoTensor;
    const OptionalTensor y = activates ? defined_or_none(saved[4]) : kNoTensor;
    ActivationBackwardCall activation{.bias = bias, .y = y};
    if (activates) {
      activation.activation = context.saved_data.at("activation").toStringView();
      activation.negative_slope = context.saved_data.at("negative_slope").toDouble();
    }
    const BackwardOpArguments op{gradients[0],     saved[0], weight,    saved[2],
                                 wanted_by(flags), call,     activation};
    const auto [dx, dweight, dbias, dresidual] = backward_of(op, flags);
    const at::Tensor none;
    return {op.wanted.dx ? dx : none,
            op.wanted.dweight ? dweight : none,
            op.wanted.dbias ? dbias : none,
            (flags & kWantsDResidual) != 0 ? dresidual : none,
            none,
            none};
  }

  static BackwardTensors backward_of(const BackwardOpArguments& op, std::int64_t flags) {
    if ((flags & kDecomposes) != 0 && is_recorded_for_a_graph()) return backward_in_graph(op);
    if (op.activation.activates() && at::GradMode::is_enabled()) return by_single_operations(op);
    return op.pass_to(backward_op());
  }

  // Records a graph, because the result is differentiated once more.
  static BackwardTensors by_single_operations(const BackwardOpArguments& op) {
    const ActivationBackwardCall& after = op.activation;
    const ActivationFunction activation = parsed_activation(after.activation, after.negative_slope);
    // The slope of a piecewise linear activation is constant: no gradient flows to z or y.
    const at::Tensor z =
        after.y ? after.y->detach()
                : NormalizedAgain::apply(op.x, op.weight, after.bias, op.statistics, op.call);
    const at::Tensor dz =
        activation_gradient(activation, activation.is_piecewise_linear() ? z.detach() : z, op.dy);
    const BackwardOpArguments of_dz{dz, op.x, op.weight, op.statistics, op.wanted, op.call};
    const auto [dx, dweight, dbias, none] = of_dz.pass_to(backward_op());
    return {dx, dweight, dbias, dz};
  }
};

std::tuple<at::Tensor, at::Tensor> forward_with_node(const ForwardOpArguments& given) {
  // Under autocast some operations refuse tensors of several types, and others round them.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  note_forward();
  ForwardOpArguments op = given;
  const OptionalTensor& residual = op.activation.residual;
  op.needs_backward = needs_backward(op.x, {op.weight, op.bias, residual});
  if (uses_torch_kernels(op.x) || is_left_to_torch(op)) return portable_forward(op);
  if (!*op.needs_backward) return below_autograd(op);
  at::Tensor statistics;
  const variable_list outputs =
      BatchNorm::apply(op.x, op.weight, op.bias, residual, op, &statistics);
  return {outputs[0], statistics};
}

std::tuple<at::Tensor, at::Tensor> forward(const ForwardOpArguments& op) {
  return or_tell_peers(op.call, [&] { return forward_with_node(op); });
}

// With an activation it needs no graph: a backward that is differentiated runs
// BatchNorm::by_single_operations() instead.
BackwardTensors backward(const BackwardOpArguments& op) {
  if (!at::GradMode::is_enabled() || op.activation.activates()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.pass_to(backward_op());
  }
  const variable_list outputs = BatchNormBackward::apply(op.dy, op.x, op.weight, op);
  return {outputs[0], outputs[1], outputs[2], at::empty({0}, op.x.options())};
}

GradientTensors double_backward(const DoubleBackwardOpArguments& op) {
  if (!at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.pass_to(double_backward_op());
  }
  const variable_list outputs = BatchNormDoubleBackward::apply(
      op.grad_dx, op.grad_dweight, op.grad_dbias, op.dy, op.x, op.weight, op);
  return {outputs[0], outputs[1], outputs[2]};
}

// An op that only graphs contain. A compiler records it together with its backward; an exported
// program has no backward, and torch's fallback would only warn that gradients are missing.
class WithoutGradient : public ::torch::autograd::Function<WithoutGradient> {
 public:
  static variable_list forward(AutogradContext*, at::TensorList /*differentiable*/,
                               const std::function<variable_list()>& call) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call();
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false,
        "normscope.batch_norm: expected no backward of an exported program in which, after "
        "run_decompositions(), ranks share statistics or a dynamic batch has slices, got one; "
        "train the program without run_decompositions()");
  }
};

std::vector<at::Tensor> keep_order_without_gradient(at::TensorList values) {
  return WithoutGradient::apply(values, [values] { return keep_order(values.vec()); });
}

StatisticsTensors statistics_without_gradient(const ForwardOpArguments& op) {
  variable_list differentiable = {op.x};
  for (const OptionalTensor* each : {&op.weight, &op.bias}) {
    if (*each) differentiable.push_back(**each);
  }
  const variable_list results = WithoutGradient::apply(at::TensorList(differentiable), [&] {
    return std::apply([](const auto&... tensors) { return variable_list{tensors...}; },
                      op.pass_to(statistics_op()));
  });
  return {results[0], results[1], results[2], results[3], results[4], results[5]};
}

}  // namespace

TORCH_LIBRARY_IMPL(normscope, Autograd, m) {
  m.impl("keep_order", &keep_order_without_gradient);
  m.impl("batch_norm_statistics", &Taken<StatisticsOp, &statistics_without_gradient>::call);
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_double_backward", &Taken<DoubleBackwardOp, &double_backward>::call);
}

}  // namespace normscope::binding::autograd
