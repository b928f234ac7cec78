// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/autograd.h"

#include <functional>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/calls/recomputation.h"
#include "normscope/torch/calls/recording.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/ops/backends.h"
#include "normscope/torch/ops/graph.h"
#include "normscope/torch/ops/saved_call.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/kernels_in_use.h"
#include "normscope/torch/tensors/pointwise.h"

namespace normscope::binding::autograd {
namespace {

using ::torch::autograd::AutogradContext;
using ::torch::autograd::variable_list;

bool requires_grad(const OptionalTensor& tensor) { return tensor && tensor->requires_grad(); }

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

// Autograd would refuse these after the op, which has then updated the running statistics.
void check_can_be_saved(const ForwardOpArguments& op) {
  const auto check = [](const at::Tensor& tensor, const char* name) {
    TORCH_CHECK(!tensor.is_inference(), name,
                ": expected a tensor that can be saved for backward, got one made in "
                "torch.inference_mode(); pass a clone() of it");
  };
  check(op.x, "x");
  if (op.weight) check(*op.weight, "weight");
  if (op.bias && op.activation.activates()) check(*op.bias, "bias");
}

bool is_in_graph(const ForwardOpArguments& op) { return op.graph && is_recorded_for_a_graph(); }

ForwardTensors below_autograd(const ForwardOpArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const bool is_left_to_compiler = op.decomposes() && op.activation.activates();
  if (is_in_graph(op) && !is_left_to_compiler) return forward_in_graph(op);
  if (backend::are_reached_by(keys_of(op.all()))) return backend::forward(op);
  static const auto next = op_named<ForwardOp>("normscope::batch_norm_forward");
  return call_op(next, op.all());
}

BackwardTensors below_autograd(const BackwardOpArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return backend::are_reached_by(keys_of(op.all())) ? backend::backward(op)
                                                    : call_op(backward_op(), op.all());
}

// A backward that can be differentiated once more.
class BatchNormBackward : public ::torch::autograd::Function<BatchNormBackward> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const BackwardOpArguments& op) {
    const auto [dx, dweight, dbias, none] = below_autograd(op);
    const at::Tensor absent;
    context->save_for_backward({dy, x, weight.value_or(absent), op.statistics,
                                op.spread.value_or(absent), op.counts.value_or(absent)});
    context->set_materialize_grads(false);
    SavedCall{.call = op.call}.save_in(*context);
    return {dx, dweight, dbias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const ScopedCall call = SavedCall::of(*context).call;
    return or_notify_peers(call, [&]() -> variable_list {
      const variable_list saved = context->get_saved_variables();
      const OptionalTensor grad_dx = defined_or_none(gradients[0]);
      const OptionalTensor grad_dweight = defined_or_none(gradients[1]);
      const OptionalTensor grad_dbias = defined_or_none(gradients[2]);
      const OptionalTensor weight = defined_or_none(saved[2]);
      const OptionalTensor spread = defined_or_none(saved[4]);
      const OptionalTensor counts = defined_or_none(saved[5]);
      const DoubleBackwardOpArguments op{grad_dx, grad_dweight, grad_dbias, saved[0], saved[1],
                                         weight,  saved[3],     call,       spread,   counts};
      const auto [grad_dy, grad_x, grad_weight] = call_op(double_backward_op(), op.all());
      const at::Tensor none;
      return {grad_dy, grad_x, weight ? grad_weight : none, none};
    });
  }
};

// Gradients that cannot be differentiated again: an attempt is an error, and does not give zeros.
class BatchNormDoubleBackward : public ::torch::autograd::Function<BatchNormDoubleBackward> {
 public:
  static variable_list forward(AutogradContext*, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const DoubleBackwardOpArguments& op) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [grad_dy, grad_x, grad_weight] = call_op(double_backward_op(), op.all());
    return {grad_dy, grad_x, grad_weight};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "normscope.batch_norm: expected at most two differentiations, got a third");
  }
};

// The gradients that are wanted; undefined tensors for the others.
variable_list wanted_of(const WantedGradients& wanted, const at::Tensor& dx,
                        const at::Tensor& dweight, const at::Tensor& dbias) {
  const at::Tensor none;
  return {wanted.dx ? dx : none, wanted.dweight ? dweight : none, wanted.dbias ? dbias : none};
}

WantedGradients wanted_by(const at::Tensor& x, const OptionalTensor& weight,
                          const OptionalTensor& bias) {
  return {x.requires_grad(), requires_grad(weight), requires_grad(bias)};
}

// Recomputes z of a forward, with a graph. Needed if a backward is itself differentiated.
class NormalizedAgain : public ::torch::autograd::Function<NormalizedAgain> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const OptionalTensor& weight, const OptionalTensor& bias,
                            const BackwardOpArguments& op) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({x, weight.value_or(at::Tensor()), op.statistics});
    SavedCall{.call = op.call, .wanted = wanted_by(x, weight, bias)}.save_in(*context);
    return call_op(with_statistics_op(),
                   WithStatisticsOpArguments{x, weight, bias, op.statistics}.all());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const OptionalTensor weight = defined_or_none(saved[1]);
    const SavedCall of = SavedCall::of(*context);
    const BackwardOpArguments op{gradients[0], saved[0], weight, saved[2], of.wanted, of.call};
    const auto [dx, dweight, dbias, dresidual] = call_op(backward_op(), op.all());
    variable_list results = wanted_of(of.wanted, dx, dweight, dbias);
    results.resize(4);
    return results;
  }
};

// Records a graph, because the result is differentiated once more.
BackwardTensors by_single_operations(const BackwardOpArguments& op) {
  const ActivationBackwardCall& after = op.activation;
  const ActivationFunction activation = parsed_activation(after.activation, after.negative_slope);
  // The slope of a piecewise linear activation is constant: no gradient flows to z or y.
  const at::Tensor z =
      after.y ? after.y->detach() : NormalizedAgain::apply(op.x, op.weight, after.bias, op);
  const at::Tensor dz =
      activation_gradient(activation, activation.is_piecewise_linear() ? z.detach() : z, op.dy);
  const BackwardOpArguments of_dz{dz, op.x, op.weight, op.statistics, op.wanted, op.call};
  const auto [dx, dweight, dbias, none] = call_op(backward_op(), of_dz.all());
  return {dx, dweight, dbias, dz};
}

BackwardTensors backward_of(const BackwardOpArguments& op, bool decomposes) {
  if (decomposes && !op.activation.activates() && is_recorded_for_a_graph()) {
    return backward_in_graph(op);
  }
  if (at::GradMode::is_enabled()) {
    return op.activation.activates() ? by_single_operations(op) : call_op(backward_op(), op.all());
  }
  return below_autograd(op);
}

// The layer, and the activation that may follow it.
class BatchNorm : public ::torch::autograd::Function<BatchNorm> {
 public:
  // Tensors that get gradients are separate arguments, because torch looks for them there. The
  // statistics are no output: compiled autograd takes no outputs that are not differentiable.
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const OptionalTensor& residual, const ForwardOpArguments& op,
                               ForwardTensors* done) {
    *done = below_autograd(op);
    const auto& [y, statistics, spread, counts] = *done;
    variable_list saved{x, weight.value_or(at::Tensor()), statistics};
    if (op.activation.activates()) {
      saved.push_back(bias.value_or(at::Tensor()));
      saved.push_back(residual ? y : at::Tensor());
    } else if (spread.defined()) {  // torch's kernels leave activations to torch
      saved.push_back(spread);
      saved.push_back(counts);
    }
    context->save_for_backward(std::move(saved));
    SavedCall{.call = op.call,
              .wanted = wanted_by(x, weight, bias),
              .wants_dresidual = requires_grad(residual),
              .decomposes = op.decomposes(),
              .activation = op.activation.activation,
              .negative_slope = op.activation.negative_slope}
        .save_in(*context);
    return {y};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const SavedCall of = SavedCall::of(*context);
    return or_notify_peers(of.call, [&] { return gradients_of(*context, of, gradients[0]); });
  }

 private:
  static variable_list gradients_of(const AutogradContext& context, const SavedCall& of,
                                    const at::Tensor& dy) {
    const variable_list saved = context.get_saved_variables();
    const at::Tensor& x = saved[0];
    const OptionalTensor weight = defined_or_none(saved[1]);
    const bool activates = of.activates();
    const bool by_torch = !activates && saved.size() > 3;
    const OptionalTensor bias = activates ? defined_or_none(saved[3]) : kNoTensor;
    const OptionalTensor y = activates ? defined_or_none(saved[4]) : kNoTensor;
    const OptionalTensor spread = by_torch ? defined_or_none(saved[3]) : kNoTensor;
    const OptionalTensor counts = by_torch ? defined_or_none(saved[4]) : kNoTensor;
    const BackwardOpArguments op{dy,
                                 x,
                                 weight,
                                 saved[2],
                                 of.wanted,
                                 of.call,
                                 {of.activation, of.negative_slope, bias, y},
                                 spread,
                                 counts};
    const auto [dx, dweight, dbias, dresidual] = backward_of(op, of.decomposes);
    variable_list results = wanted_of(of.wanted, dx, dweight, dbias);
    results.push_back(of.wants_dresidual ? dresidual : at::Tensor());
    results.resize(6);
    return results;
  }
};

// With a node for autograd if one is needed.
ForwardTensors normalized(const ForwardOpArguments& op) {
  if (!op.needs_backward.value_or(false)) return below_autograd(op);
  ForwardTensors done;
  std::get<0>(done) =
      BatchNorm::apply(op.x, op.weight, op.bias, op.activation.residual, op, &done)[0];
  return done;
}

// A layer without an ending, and then one, which may throw: the buffers are written after both.
template <class Layer>
ForwardTensors in_steps(const ForwardOpArguments& op, const Layer& layer, const Ending& ending) {
  std::optional<BufferCopies> copies;
  if (BufferCopies::can_be_made(op)) copies.emplace(op);
  ForwardTensors done = layer(copies ? copies->in(op) : op);
  at::Tensor& y = std::get<0>(done);
  y = ending(y);
  if (copies) copies->write_back();
  return done;
}

// What is needed before the exchange is known.
std::tuple<Scope, ActivationFunction> checked_before(const ForwardOpArguments& op) {
  try {
    return {parsed_scope(op.call.scope), checked(op.activation, op.x)};
  } catch (...) {
    notify_peers(op.call, nullptr);
    throw;
  }
}

// Whether operations of torch take the place of an op. In graphs, those of ranks that share
// statistics are the same ops for all kernels, but torch's have no activation.
bool is_for_torchs_kernels(const ForwardOpArguments& op) {
  if (is_left_to_torch(op)) return true;
  if (!uses_torch_kernels(op.x)) return false;
  return !is_in_graph(op) || op.activation.activates() ||
         is_of_one_rank(parsed_scope(op.call.scope), op.call);
}

ForwardTensors forward_with_node(const ForwardOpArguments& given) {
  // Under autocast some operations refuse tensors of several types, and others round them.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  note_forward();
  ForwardOpArguments op = given;
  TORCH_CHECK_TYPE(op.x.defined(), "x: expected a tensor, got none");
  op.needs_backward = needs_backward(op.x, {op.weight, op.bias, op.activation.residual});
  if (*op.needs_backward) check_can_be_saved(op);
  return is_for_torchs_kernels(op) ? forward_by_torchs_kernels(op) : normalized(op);
}

ForwardTensors forward(const ForwardOpArguments& op) {
  return or_notify_peers(op.call, [&] { return forward_with_node(op); });
}

// With an activation it needs no graph: a backward that is differentiated runs
// BatchNorm::by_single_operations() instead.
BackwardTensors backward(const BackwardOpArguments& op) {
  if (!at::GradMode::is_enabled() || op.activation.activates()) return below_autograd(op);
  const variable_list outputs = BatchNormBackward::apply(op.dy, op.x, op.weight, op);
  return {outputs[0], outputs[1], outputs[2], {}};
}

GradientTensors double_backward(const DoubleBackwardOpArguments& op) {
  if (!at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return call_op(double_backward_op(), op.all());
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
                      call_op(statistics_op(), op.of_layer()));
  });
  return {results[0], results[1], results[2], results[3], results[4], results[5]};
}

TORCH_LIBRARY_IMPL(normscope, Autograd, m) {
  m.impl("keep_order", &keep_order_without_gradient);
  m.impl("batch_norm_statistics", &Taken<StatisticsOp, &statistics_without_gradient>::call);
  m.impl("batch_norm_forward", &Taken<ForwardOp, &forward>::call);
  m.impl("batch_norm_backward", &Taken<BackwardOp, &backward>::call);
  m.impl("batch_norm_double_backward", &Taken<DoubleBackwardOp, &double_backward>::call);
}

}  // namespace

ForwardTensors forward_by_torchs_kernels(const ForwardOpArguments& op) {
  const auto [scope, activation] = checked_before(op);
  const auto layer = [&](const ForwardOpArguments& each) -> ForwardTensors {
    if (!is_of_one_rank(scope, op.call)) return normalized(each);
    return {normalize_on_this_rank(each, scope), {}, {}, {}};
  };
  const OptionalTensor& residual = op.activation.residual;
  if (!residual && !op.activation.activates()) return layer(op);
  return in_steps(op.without_ending(), layer, [&](const at::Tensor& y) {
    return activated(activation, residual ? y + *residual : y);
  });
}

at::Tensor forward_then(const ForwardOpArguments& op, const Ending& ending) {
  static const auto layer = op_named<ForwardOp>("normscope::batch_norm_forward");
  return or_notify_peers(op.call, [&] {
    const auto run = [](const ForwardOpArguments& each) { return call_op(layer, each.all()); };
    // or_notify_peers() leaves ValueErrors to the op.
    const auto notifying = [&](const at::Tensor& y) {
      try {
        return ending(y);
      } catch (...) {
        notify_peers(op.call, nullptr);
        throw;
      }
    };
    return std::get<0>(in_steps(op, run, notifying));
  });
}

}  // namespace normscope::binding::autograd
