// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "normscope/torch/exchanges.h"
#include "normscope/torch/graph.h"
#include "normscope/torch/operators.h"

namespace normscope::binding {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

const c10::TypedOperatorHandle<ForwardOp>& forward_op() {
  static const auto op = op_named<ForwardOp>("normscope::batch_norm_forward");
  return op;
}

const c10::TypedOperatorHandle<BackwardOp>& backward_op() {
  static const auto op = op_named<BackwardOp>("normscope::batch_norm_backward");
  return op;
}

const c10::TypedOperatorHandle<DoubleBackwardOp>& double_backward_op() {
  static const auto op = op_named<DoubleBackwardOp>("normscope::batch_norm_double_backward");
  return op;
}

bool requires_grad(const OptionalTensor& tensor) { return tensor && tensor->requires_grad(); }

// Calls an op. Where the dispatcher has none for such tensors (sparse ones), no backend can tell
// the peers that this rank will not come.
template <class CallOp>
auto reach_backend(const ScopedCall& call, const CallOp& call_op) {
  try {
    return call_op();
  } catch (const c10::NotImplementedError& error) {
    fail_exchange(call.scope, call.group_name, error.what_without_backtrace());
    throw;
  }
}

std::tuple<at::Tensor, at::Tensor> below_autograd(const ForwardOpArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (op.decompose.has_value() && is_recorded_for_a_graph()) return forward_in_graph(op);
  return op.pass_to(forward_op());
}

// What backward needs to know of a forward's call, and double backward of a backward's.
void save(AutogradContext* context, const ScopedCall& call) {
  context->saved_data["scope"] = std::string(call.scope);
  context->saved_data["group_name"] = std::string(call.group_name);
  context->saved_data["layer"] = std::string(call.layer);
}

ScopedCall call_saved_in(const AutogradContext& context) {
  const auto text = [&](const char* name) { return context.saved_data.at(name).toStringView(); };
  return {text("scope"), text("group_name"), text("layer")};
}

class BatchNorm : public ::torch::autograd::Function<BatchNorm> {
 public:
  // The tensors that gradients flow to are arguments of their own: torch looks for them there.
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const ForwardOpArguments& op) {
    const auto [y, statistics] = below_autograd(op);
    context->save_for_backward({x, weight.value_or(at::Tensor()), statistics});
    context->mark_non_differentiable({statistics});
    context->saved_data["wants_dx"] = x.requires_grad();
    context->saved_data["wants_dweight"] = requires_grad(weight);
    context->saved_data["wants_dbias"] = requires_grad(bias);
    context->saved_data["decompose"] = op.decompose.value_or(false);
    save(context, op.call);
    return {y, statistics};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto flag = [&](const char* name) { return context->saved_data.at(name).toBool(); };
    const WantedGradients wanted{flag("wants_dx"), flag("wants_dweight"), flag("wants_dbias")};
    const ScopedCall call = call_saved_in(*context);
    const OptionalTensor weight = defined_or_none(saved[1]);
    const BackwardOpArguments op{gradients[0], saved[0], weight, saved[2], wanted, call};
    const bool decompose = flag("decompose") && is_recorded_for_a_graph();
    const auto [dx, dweight, dbias] = reach_backend(
        call, [&] { return decompose ? backward_in_graph(op) : op.pass_to(backward_op()); });
    const at::Tensor none;
    return {wanted.dx ? dx : none, wanted.dweight ? dweight : none, wanted.dbias ? dbias : none,
            none};
  }
};

class BatchNormBackward : public ::torch::autograd::Function<BatchNormBackward> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const BackwardOpArguments& op) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [dx, dweight, dbias] = op.pass_to(backward_op());
    context->save_for_backward({dy, x, weight.value_or(at::Tensor()), op.statistics});
    context->set_materialize_grads(false);
    save(context, op.call);
    return {dx, dweight, dbias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const OptionalTensor grad_dx = defined_or_none(gradients[0]);
    const OptionalTensor grad_dweight = defined_or_none(gradients[1]);
    const OptionalTensor grad_dbias = defined_or_none(gradients[2]);
    const OptionalTensor weight = defined_or_none(saved[2]);
    const DoubleBackwardOpArguments op{grad_dx,  grad_dweight, grad_dbias, saved[0],
                                       saved[1], weight,       saved[3],   call_saved_in(*context)};
    const auto [grad_dy, grad_x, grad_weight] = op.pass_to(double_backward_op());
    return {grad_dy, grad_x, weight ? grad_weight : at::Tensor(), at::Tensor()};
  }
};

// Gradients that cannot be differentiated again: an error then, not a zero.
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

std::tuple<at::Tensor, at::Tensor> forward(const ForwardOpArguments& given) {
  ForwardOpArguments op = given;
  op.needs_backward = at::GradMode::is_enabled() &&
                      (op.x.requires_grad() || requires_grad(op.weight) || requires_grad(op.bias));
  if (!*op.needs_backward) return below_autograd(op);
  const variable_list outputs = BatchNorm::apply(op.x, op.weight, op.bias, op);
  return {outputs[0], outputs[1]};
}

GradientTensors backward(const BackwardOpArguments& op) {
  if (!at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.pass_to(backward_op());
  }
  const variable_list outputs = BatchNormBackward::apply(op.dy, op.x, op.weight, op);
  return {outputs[0], outputs[1], outputs[2]};
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

}  // namespace

TORCH_LIBRARY_IMPL(normscope, Autograd, m) {
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_double_backward", &Taken<DoubleBackwardOp, &double_backward>::call);
}

}  // namespace normscope::binding
