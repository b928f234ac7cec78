// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <ATen/Context.h>
#include <ATen/ops/batch_norm.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "normscope/torch/arguments.h"
#include "normscope/torch/exchanges.h"
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
template <class Call>
auto reach_backend(std::string_view scope, std::string_view group_name, const Call& call) {
  try {
    return call();
  } catch (const c10::NotImplementedError& error) {
    fail_exchange(scope, group_name, error.what_without_backtrace());
    throw;
  }
}

// The op's arguments that no gradient flows through.
struct Constants {
  const OptionalTensor& running_mean;
  const OptionalTensor& running_var;
  const OptionalTensor& num_batches_tracked;
  std::optional<double> momentum;
  double eps;
  at::IntArrayRef dims;
  std::string_view scope;
  std::string_view slice_stats;
  std::string_view group_name;
  std::string_view layer;
};

class BatchNorm : public ::torch::autograd::Function<BatchNorm> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               const Constants& constants) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [y, statistics] =
        forward_op().call(x, weight, bias, constants.running_mean, constants.running_var,
                          constants.num_batches_tracked, constants.momentum, constants.eps,
                          constants.dims, constants.scope, constants.slice_stats,
                          /*needs_backward=*/true, constants.group_name, constants.layer);
    context->save_for_backward({x, weight.value_or(at::Tensor()), statistics});
    context->mark_non_differentiable({statistics});
    context->saved_data["wants_dx"] = x.requires_grad();
    context->saved_data["wants_dweight"] = requires_grad(weight);
    context->saved_data["wants_dbias"] = requires_grad(bias);
    context->saved_data["scope"] = std::string(constants.scope);
    context->saved_data["group_name"] = std::string(constants.group_name);
    context->saved_data["layer"] = std::string(constants.layer);
    return {y, statistics};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    const auto flag = [&](const char* name) { return data.at(name).toBool(); };
    const auto text = [&](const char* name) { return data.at(name).toStringView(); };
    const auto [dx, dweight, dbias] = reach_backend(text("scope"), text("group_name"), [&] {
      return backward_op().call(gradients[0], saved[0], defined_or_none(saved[1]), saved[2],
                                flag("wants_dx"), flag("wants_dweight"), flag("wants_dbias"),
                                text("scope"), text("group_name"), text("layer"));
    });
    const auto if_wanted = [&](const char* name, const at::Tensor& gradient) {
      return flag(name) ? gradient : at::Tensor();
    };
    return {if_wanted("wants_dx", dx), if_wanted("wants_dweight", dweight),
            if_wanted("wants_dbias", dbias), at::Tensor()};
  }
};

// The backward op's arguments that no gradient flows through.
struct BackwardConstants {
  const at::Tensor& statistics;
  bool wants_dx;
  bool wants_dweight;
  bool wants_dbias;
  std::string_view scope;
  std::string_view group_name;
  std::string_view layer;
};

class BatchNormBackward : public ::torch::autograd::Function<BatchNormBackward> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& dy, const at::Tensor& x,
                               const OptionalTensor& weight, const BackwardConstants& constants) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [dx, dweight, dbias] = backward_op().call(
        dy, x, weight, constants.statistics, constants.wants_dx, constants.wants_dweight,
        constants.wants_dbias, constants.scope, constants.group_name, constants.layer);
    context->save_for_backward({dy, x, weight.value_or(at::Tensor()), constants.statistics});
    context->set_materialize_grads(false);
    context->saved_data["scope"] = std::string(constants.scope);
    context->saved_data["group_name"] = std::string(constants.group_name);
    context->saved_data["layer"] = std::string(constants.layer);
    return {dx, dweight, dbias};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto text = [&](const char* name) { return context->saved_data.at(name).toStringView(); };
    const auto [grad_dy, grad_x, grad_weight] = double_backward_op().call(
        defined_or_none(gradients[0]), defined_or_none(gradients[1]), defined_or_none(gradients[2]),
        saved[0], saved[1], defined_or_none(saved[2]), saved[3], text("scope"), text("group_name"),
        text("layer"));
    return {grad_dy, grad_x, saved[2].defined() ? grad_weight : at::Tensor(), at::Tensor()};
  }
};

// Gradients that cannot be differentiated again: an error then, not a zero.
class BatchNormDoubleBackward : public ::torch::autograd::Function<BatchNormDoubleBackward> {
 public:
  template <class Call>
  static variable_list forward(AutogradContext*, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                               const OptionalTensor&, const Call& call) {
    const auto [grad_dy, grad_x, grad_weight] = call();
    return {grad_dy, grad_x, grad_weight};
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "normscope.batch_norm: expected at most two differentiations, got a third");
  }
};

std::tuple<at::Tensor, at::Tensor> forward_autograd(
    const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, std::optional<double> momentum, double eps,
    at::IntArrayRef dims, std::string_view scope, std::string_view slice_stats, bool needs_backward,
    std::string_view group_name, std::string_view layer) {
  if (!needs_backward) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return forward_op().call(x, weight, bias, running_mean, running_var, num_batches_tracked,
                             momentum, eps, dims, scope, slice_stats, needs_backward, group_name,
                             layer);
  }
  const variable_list outputs =
      BatchNorm::apply(x, weight, bias,
                       Constants{running_mean, running_var, num_batches_tracked, momentum, eps,
                                 dims, scope, slice_stats, group_name, layer});
  return {outputs[0], outputs[1]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_autograd(
    const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
    const at::Tensor& statistics, bool wants_dx, bool wants_dweight, bool wants_dbias,
    std::string_view scope, std::string_view group_name, std::string_view layer) {
  if (!at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return backward_op().call(dy, x, weight, statistics, wants_dx, wants_dweight, wants_dbias,
                              scope, group_name, layer);
  }
  const variable_list outputs =
      BatchNormBackward::apply(dy, x, weight,
                               BackwardConstants{statistics, wants_dx, wants_dweight, wants_dbias,
                                                 scope, group_name, layer});
  return {outputs[0], outputs[1], outputs[2]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> double_backward_autograd(
    const OptionalTensor& grad_dx, const OptionalTensor& grad_dweight,
    const OptionalTensor& grad_dbias, const at::Tensor& dy, const at::Tensor& x,
    const OptionalTensor& weight, const at::Tensor& statistics, std::string_view scope,
    std::string_view group_name, std::string_view layer) {
  const auto call = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return double_backward_op().call(grad_dx, grad_dweight, grad_dbias, dy, x, weight, statistics,
                                     scope, group_name, layer);
  };
  if (!at::GradMode::is_enabled()) return call();
  const variable_list outputs =
      BatchNormDoubleBackward::apply(grad_dx, grad_dweight, grad_dbias, dy, x, weight, call);
  return {outputs[0], outputs[1], outputs[2]};
}

// torch's own arithmetic, to the bit. Touches no process group.
at::Tensor torch_batch_norm(const at::Tensor& x, const OptionalTensor& weight,
                            const OptionalTensor& bias, const OptionalTensor& running_mean,
                            const OptionalTensor& running_var, double eps) {
  const bool with_batch_statistics = !running_mean && !running_var;
  TORCH_CHECK_VALUE(eps >= 0, "eps: expected a number of at least 0, got ", eps);
  if (with_batch_statistics && x.sym_numel() == x.sym_size(1)) throw_one_value_per_channel(x);
  return at::batch_norm(x, weight, bias, running_mean, running_var, with_batch_statistics,
                        /*momentum=*/0.0, eps, at::globalContext().userEnabledCuDNN());
}

at::Tensor batch_norm(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var,
                      const OptionalTensor& num_batches_tracked, bool training,
                      std::optional<double> momentum, double eps, at::IntArrayRef dims,
                      std::string_view scope, std::string_view slice_stats,
                      std::string_view group_name, std::string_view layer) {
  if (!training) {
    check_dimensions(x, dims);
    return torch_batch_norm(x, weight, bias, running_mean, running_var, eps);
  }
  const bool needs_backward = at::GradMode::is_enabled() &&
                              (x.requires_grad() || requires_grad(weight) || requires_grad(bias));
  return std::get<0>(forward_op().call(x, weight, bias, running_mean, running_var,
                                       num_batches_tracked, momentum, eps, dims, scope, slice_stats,
                                       needs_backward, group_name, layer));
}

}  // namespace

TORCH_LIBRARY_IMPL(normscope, CompositeImplicitAutograd, m) { m.impl("batch_norm", &batch_norm); }

TORCH_LIBRARY_IMPL(normscope, Autograd, m) {
  m.impl("batch_norm_forward", &forward_autograd);
  m.impl("batch_norm_backward", &backward_autograd);
  m.impl("batch_norm_double_backward", &double_backward_autograd);
}

}  // namespace normscope::binding
