// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/nn/batch_norm.h"

#include <functional>
#include <optional>
#include <string_view>
#include <tuple>

#include <torch/nn/functional/batchnorm.h>

#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/ops/autograd.h"
#include "normscope/torch/tensors/pointwise.h"

namespace normscope::nn {
namespace {

using binding::activated;
using binding::defined_or_none;
using binding::op_named;

std::string_view name_of(SliceStats slice_stats) {
  switch (slice_stats) {
    case SliceStats::kPooled: return "pooled";
    case SliceStats::kFirst: return "first";
    case SliceStats::kSequential: break;
  }
  return "sequential";
}

// The scope to normalize a batch with. The ranks agree on it at first use.
std::string scope_in_use(const BatchNormOptions& options, const at::Tensor& x) {
  static const auto op = op_named<decltype(binding::resolve_scope)>("normscope::resolve_scope");
  std::string scope = options.scope().str();
  if (options.scope().kind() != Scope::Kind::kNormBatch || x.dim() == 0) return scope;
  return op.call(scope, options.group(), x.size(0));
}

// A buffer of running statistics, or none if the option has changed since the construction.
at::Tensor if_tracked(const BatchNormOptions& options, const at::Tensor& buffer) {
  return options.track_running_stats() ? buffer : at::Tensor();
}

// Whether one op computes this activation and residual. torch's `+` takes more than the op does.
// After a residual the op keeps y, as torch's relu does. torch's other activations keep their
// input, so that a later operation may change y in place.
bool fuses(const ActivationFunction& activation, const at::Tensor& x, const at::Tensor& residual) {
  if (!residual.defined()) return true;
  const bool has_shapes = x.defined() && !x.is_nested() && !residual.is_nested();
  return has_shapes && activation.kind == Activation::kRelu && residual.sizes() == x.sizes() &&
         residual.dtype() == x.dtype() && residual.device() == x.device();
}

}  // namespace

template <std::size_t D, class Derived, class Theirs>
at::Tensor BatchNormImplBase<D, Derived, Theirs>::forward(const at::Tensor& x,
                                                          const at::Tensor& residual) {
  const ActivationFunction& activation = this->options.activation();
  const bool is_observed = this->is_training() && this->observer;
  if (this->is_training() && !is_observed && fuses(activation, x, residual)) {
    return train_step(x, activation, residual, /*ending=*/nullptr);
  }
  const auto ending = [&](const at::Tensor& z) {
    at::Tensor y = is_observed ? this->observer(x, z) : z;
    if (residual.defined()) y = y + residual;
    return activated(activation, y);
  };
  return this->is_training() ? train_step(x, {}, {}, ending) : ending(evaluate(x));
}

template <std::size_t D, class Derived, class Theirs>
at::Tensor BatchNormImplBase<D, Derived, Theirs>::train_step(
    const at::Tensor& x, const ActivationFunction& activation, const at::Tensor& residual,
    const std::function<at::Tensor(const at::Tensor& z)>& ending) {
  static const auto op = op_named<binding::ForwardOp>("normscope::batch_norm_forward");
  const BatchNormOptions& chosen = this->options;
  const std::string scope = scope_in_use(chosen, x);
  const struct {
    binding::OptionalTensor weight, bias, running_mean, running_var, updates, residual;
  } given{defined_or_none(this->weight),
          defined_or_none(this->bias),
          defined_or_none(if_tracked(chosen, this->running_mean)),
          defined_or_none(if_tracked(chosen, this->running_var)),
          defined_or_none(if_tracked(chosen, this->num_batches_tracked)),
          defined_or_none(residual)};
  const binding::ForwardOpArguments arguments{
      .x = x,
      .weight = given.weight,
      .bias = given.bias,
      .running = {given.running_mean, given.running_var, given.updates},
      .momentum = chosen.momentum(),
      .eps = chosen.eps(),
      .dims = Derived::kDims,
      .slice_stats = name_of(chosen.slice_stats()),
      .call = {.scope = scope, .group_name = chosen.group(), .layer = chosen.layer_name()},
      .needs_backward = std::nullopt,
      .activation = {binding::name_of(activation.kind), activation.negative_slope, given.residual}};
  if (ending) return binding::autograd::forward_then(arguments, ending);
  return std::get<0>(binding::call_op(op, arguments.all()));
}

template <std::size_t D, class Derived, class Theirs>
at::Tensor BatchNormImplBase<D, Derived, Theirs>::evaluate(const at::Tensor& x) {
  this->_check_input_dim(x);
  const at::Tensor mean = if_tracked(this->options, this->running_mean);
  const auto chosen = ::torch::nn::functional::BatchNormFuncOptions()
                          .weight(this->weight)
                          .bias(this->bias)
                          .eps(this->options.eps())
                          .training(!mean.defined());
  return ::torch::nn::functional::batch_norm(x, mean, if_tracked(this->options, this->running_var),
                                             chosen);
}

template <std::size_t D, class Derived, class Theirs>
void BatchNormImplBase<D, Derived, Theirs>::adopt(const Theirs& layer) {
  if (layer.weight.defined()) {
    this->weight = this->parameters_["weight"] = layer.weight;
    this->bias = this->parameters_["bias"] = layer.bias;
  }
  if (layer.running_mean.defined()) {
    this->running_mean.set_data(layer.running_mean);
    this->running_var.set_data(layer.running_var);
    this->num_batches_tracked.set_data(layer.num_batches_tracked);
  }
  this->train(layer.is_training());
}

template <std::size_t D, class Derived, class Theirs>
void BatchNormImplBase<D, Derived, Theirs>::pretty_print(std::ostream& stream) const {
  const BatchNormOptions& chosen = this->options;
  stream << std::boolalpha << Derived::kName << "(" << chosen.num_features()
         << ", eps=" << chosen.eps() << ", momentum=";
  if (chosen.momentum()) {
    stream << *chosen.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << chosen.affine()
         << ", track_running_stats=" << chosen.track_running_stats()
         << ", scope=" << chosen.scope().str();
  if (chosen.activation().kind != Activation::kNone) {
    stream << ", activation=" << binding::name_of(chosen.activation().kind);
  }
  stream << ")";
}

template <std::size_t D, class Derived, class Theirs>
void BatchNormImplBase<D, Derived, Theirs>::_check_input_dim(const at::Tensor& x) {
  binding::check_dimensions(x, Derived::kDims);
}

template class BatchNormImplBase<1, BatchNorm1dImpl, ::torch::nn::BatchNorm1dImpl>;
template class BatchNormImplBase<2, BatchNorm2dImpl, ::torch::nn::BatchNorm2dImpl>;
template class BatchNormImplBase<3, BatchNorm3dImpl, ::torch::nn::BatchNorm3dImpl>;

}  // namespace normscope::nn
