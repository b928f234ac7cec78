// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <optional>
#include <tuple>

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include "normscope/torch/groups/registry.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/ops/activation.h"
#include "normscope/torch/ops/arguments.h"
#include "normscope/torch/ops/finite.h"
#include "normscope/torch/ops/graph.h"
#include "normscope/torch/ops/saved_call.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/device.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

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
    save_for_double_backward(context, dy, x, weight, stored_statistics(mean, inv_std), op.call);
    return {dx, dweight, dbias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return double_backward_of(*context, gradients);
  }
};

PortableTensors forward_below_autograd(const ForwardOpArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto next = op_named<PortableForwardOp>("normscope::portable_forward");
  const bool in_graph = op.graph.has_value() && is_recorded_for_a_graph();
  return in_graph ? portable_forward_in_graph(op) : op.pass_to(next);
}

class PortableBatchNorm : public ::torch::autograd::Function<PortableBatchNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const ForwardOpArguments& op) {
    const auto [y, mean, spread, counts] = forward_below_autograd(op);
    context->save_for_backward({x, weight.value_or(at::Tensor()), mean, spread, counts});
    context->saved_data["eps"] = op.eps;
    save_flags(context, x, weight, bias, op.decomposes() ? kDecomposes : 0);
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
    const WantedGradients wanted = wanted_by(flags);
    const OptionalTensor weight = defined_or_none(saved[1]);
    const PortableBackwardArguments op{
        gradients[0], saved[0], weight,
        saved[2],     wanted,   call,
        saved[3],     saved[4], context.saved_data.at("eps").toDouble()};
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

at::Tensor normalized(const ForwardOpArguments& op, const Scope& scope) {
  if (scope.is_of_one_rank() || !has_peers(op.call.group_name)) {
    const ExchangeUse shown(Direction::kForward, op.call,
                            placement_of_messages(op.call, op.x).value_or(Placement{}));
    const Slicing slicing = checked(op, scope);
    check_finite(op.x, nullptr, Direction::kForward, op.call);
    return normalize_on_this_rank(op, slicing);
  }
  if (op.needs_backward.value_or(false)) {
    return PortableBatchNorm::apply(op.x, op.weight, op.bias, op)[0];
  }
  return std::get<0>(forward_below_autograd(op));
}

// What is needed before the exchange is known.
std::tuple<Scope, ActivationFunction> checked_before(const ForwardOpArguments& op) {
  try {
    return {parsed_scope(op.call.scope), checked(op.activation, op.x)};
  } catch (...) {
    tell_peers(op.call, nullptr);
    throw;
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> portable_forward(const ForwardOpArguments& op) {
  const auto [scope, activation] = checked_before(op);
  const OptionalTensor& residual = op.activation.residual;
  const at::Tensor no_statistics = at::empty({0}, op.x.options());
  const bool ends_with_more = residual || op.activation.activates();
  std::optional<BufferCopies> copies;
  if (ends_with_more && BufferCopies::can_be_made(op)) copies.emplace(op);
  at::Tensor y = normalized(copies ? copies->in(op) : op, scope);
  if (residual) y = y + *residual;
  y = activated(activation, y);
  if (copies) copies->write_back();
  return {y, no_statistics};
}

}  // namespace normscope::binding
