// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include "normscope/torch/tensors/op.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {

// The C++ types of the ops that operators.cpp declares, and the arguments of each as one struct.

// What torch's dispatcher looks at: the keys of all tensors of an op.
[[nodiscard]] inline c10::DispatchKeySet keys_of(const at::Tensor& tensor) {
  return tensor.key_set();
}
[[nodiscard]] inline c10::DispatchKeySet keys_of(const OptionalTensor& tensor) {
  return tensor ? tensor->key_set() : c10::DispatchKeySet();
}
template <class... Tensors>
[[nodiscard]] c10::DispatchKeySet keys_of(const Tensors&... tensors) {
  return (keys_of(tensors) | ...);
}

// Running statistics, which a forward updates.
struct RunningTensors {
  const OptionalTensor& mean;     // [C]
  const OptionalTensor& var;      // [C]
  const OptionalTensor& updates;  // [] num_batches_tracked

  // Checked before they are written, and marked as written afterwards.
  [[nodiscard]] std::array<const OptionalTensor*, 3> all() const { return {&mean, &var, &updates}; }
};

// The operations after a layer: a residual is added, then an activation is applied ("relu",
// "relu6", "leaky_relu", "silu", "hard_swish" or "none").
struct ActivationCall {
  std::string_view activation = "none";
  double negative_slope = 0.0;                 // for leaky_relu
  const OptionalTensor& residual = kNoTensor;  // [N, C, *]

  [[nodiscard]] bool activates() const { return activation != "none"; }
};

// The arguments that every op of a layer's forward begins with, in the order of the struct below.
template <class Result, class... Others>
using LayerForwardOp = Result(const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                              std::optional<double>, double, at::IntArrayRef, std::string_view,
                              std::string_view, std::string_view, std::string_view,
                              const OptionalTensor&, std::optional<bool>, Others...);

// y, and the statistics that a backward needs. By this library's kernels: [slices, 3, C] float64,
// and two undefined tensors. By torch's, of ranks that share statistics: the mean, the spread and
// the counts (portable/batch_norm.h); of a rank alone: none.
using ForwardTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using ForwardOp = LayerForwardOp<ForwardTensors, std::string_view, double, const OptionalTensor&,
                                 std::optional<std::string_view>>;

// Changes none of its arguments. Returns the statistics, the coefficients, and the new values of
// the running statistics and of `accumulated`, which are empty tensors if the argument is absent.
using StatisticsTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using StatisticsOp = LayerForwardOp<StatisticsTensors>;

struct ForwardOpArguments {
  const at::Tensor& x;           // [N, C, *]
  const OptionalTensor& weight;  // [C]
  const OptionalTensor& bias;    // [C]
  RunningTensors running;
  std::optional<double> momentum;  // none: cumulative average
  double eps;
  at::IntArrayRef dims;  // the numbers of dimensions that x may have; empty: any from 2
  std::string_view slice_stats;
  ScopedCall call;
  const OptionalTensor& accumulated = kNoTensor;  // [moments_size(C)] float64 += the moments
  std::optional<bool> needs_backward;             // nullopt: autograd decides
  ActivationCall activation = {};
  std::optional<std::string_view> graph = std::nullopt;  // how a graph records it: see graph.h

  [[nodiscard]] ForwardOpArguments with(const OptionalTensor& other_weight,
                                        const RunningTensors& other_running,
                                        const OptionalTensor& other_accumulated) const {
    return {x,    other_weight, bias, other_running,     momentum,       eps,
            dims, slice_stats,  call, other_accumulated, needs_backward, activation};
  }

  // The layer without what follows it.
  [[nodiscard]] ForwardOpArguments without_ending() const {
    return {x,           weight, bias,        running,        momentum, eps,  dims,
            slice_stats, call,   accumulated, needs_backward, {},       graph};
  }

  [[nodiscard]] bool decomposes() const { return graph && !graph->starts_with("exact"); }

  [[nodiscard]] c10::DispatchKeySet keys() const {
    return keys_of(x, weight, bias, running.mean, running.var, running.updates, accumulated,
                   activation.residual);
  }

 private:
  template <class Op, class... Others>
  auto call_op(const Op& op, const Others&... others) const {
    return op.call(x, weight, bias, running.mean, running.var, running.updates, momentum, eps, dims,
                   slice_stats, call.scope, call.group_name, call.layer, accumulated,
                   needs_backward, others...);
  }

 public:
  auto pass_to(const c10::TypedOperatorHandle<ForwardOp>& op) const {
    return call_op(op, activation.activation, activation.negative_slope, activation.residual,
                   graph);
  }
  template <class Result>
  Result pass_to(const c10::TypedOperatorHandle<LayerForwardOp<Result>>& op) const {
    return call_op(op);
  }
};

template <class Result, class... Others>
using LayerBackwardOp = Result(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                               const at::Tensor&, bool, bool, bool, std::string_view,
                               std::string_view, std::string_view, Others...);

// The last one is the gradient of the residual; undefined without a residual.
using BackwardTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BackwardOp =
    LayerBackwardOp<BackwardTensors, std::string_view, double, const OptionalTensor&,
                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&>;
using GradientSumsOp = LayerBackwardOp<GradientTensors>;

// What a backward needs to know of the operations after the layer.
struct ActivationBackwardCall {
  std::string_view activation = "none";
  double negative_slope = 0.0;
  const OptionalTensor& bias = kNoTensor;  // [C]
  const OptionalTensor& y = kNoTensor;     // [N, C, *] forward's, if it had a residual

  [[nodiscard]] bool activates() const { return activation != "none"; }
};

struct BackwardOpArguments {
  const at::Tensor& dy;          // [N, C, *]
  const at::Tensor& x;           // [N, C, *]
  const OptionalTensor& weight;  // [C]
  const at::Tensor& statistics;  // this and the last two: ForwardTensors
  WantedGradients wanted;
  ScopedCall call;
  ActivationBackwardCall activation = {};
  const OptionalTensor& spread = kNoTensor;
  const OptionalTensor& counts = kNoTensor;

  [[nodiscard]] c10::DispatchKeySet keys() const {
    return keys_of(dy, x, weight, statistics, activation.bias, activation.y, spread, counts);
  }

 private:
  template <class Op, class... Others>
  auto call_op(const Op& op, const Others&... others) const {
    return op.call(dy, x, weight, statistics, wanted.dx, wanted.dweight, wanted.dbias, call.scope,
                   call.group_name, call.layer, others...);
  }

 public:
  auto pass_to(const c10::TypedOperatorHandle<BackwardOp>& op) const {
    return call_op(op, activation.activation, activation.negative_slope, activation.bias,
                   activation.y, spread, counts);
  }
  auto pass_to(const c10::TypedOperatorHandle<GradientSumsOp>& op) const { return call_op(op); }
};

using DoubleBackwardOp = GradientTensors(const OptionalTensor& grad_dx,
                                         const OptionalTensor& grad_dweight,
                                         const OptionalTensor& grad_dbias, const at::Tensor& dy,
                                         const at::Tensor& x, const OptionalTensor& weight,
                                         const at::Tensor& statistics, std::string_view scope,
                                         std::string_view group_name, std::string_view layer,
                                         const OptionalTensor& spread,
                                         const OptionalTensor& counts);

struct DoubleBackwardOpArguments {
  const OptionalTensor& grad_dx;       // [N, C, *]
  const OptionalTensor& grad_dweight;  // [C]
  const OptionalTensor& grad_dbias;    // [C]
  const at::Tensor& dy;                // [N, C, *]
  const at::Tensor& x;                 // [N, C, *]
  const OptionalTensor& weight;        // [C]
  const at::Tensor& statistics;        // this and the last two: ForwardTensors
  ScopedCall call;
  const OptionalTensor& spread = kNoTensor;
  const OptionalTensor& counts = kNoTensor;

  auto pass_to(const c10::TypedOperatorHandle<DoubleBackwardOp>& op) const {
    return op.call(grad_dx, grad_dweight, grad_dbias, dy, x, weight, statistics, call.scope,
                   call.group_name, call.layer, spread, counts);
  }
};

using WithStatisticsOp = at::Tensor(const at::Tensor& x, const OptionalTensor& weight,
                                    const OptionalTensor& bias, const at::Tensor& statistics,
                                    std::string_view activation, double negative_slope,
                                    const OptionalTensor& residual, const OptionalTensor& spread,
                                    const OptionalTensor& counts);

struct WithStatisticsOpArguments {
  const at::Tensor& x;           // [N, C, *]
  const OptionalTensor& weight;  // [C]
  const OptionalTensor& bias;    // [C]
  const at::Tensor& statistics;  // this and the last two: ForwardTensors
  ActivationCall activation = {};
  const OptionalTensor& spread = kNoTensor;
  const OptionalTensor& counts = kNoTensor;

  auto pass_to(const c10::TypedOperatorHandle<WithStatisticsOp>& op) const {
    return op.call(x, weight, bias, statistics, activation.activation, activation.negative_slope,
                   activation.residual, spread, counts);
  }
};

// Finalizes the moments of a norm batch, which may be a sum of several tensors of moments.
using FinalizeOp = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, std::optional<double>, double, at::ScalarType);

struct FinalizeOpArguments {
  const at::Tensor& moments;  // [moments_size(C)] float64
  RunningTensors running;
  std::optional<double> momentum;  // none: cumulative average
  double eps;
  at::ScalarType dtype;  // of x
};

using KeepOrderOp = std::vector<at::Tensor>(at::TensorList values);

using ResolveScopeOp = std::string(std::string_view scope, std::string_view group_name,
                                   std::optional<std::int64_t> samples);

using FailExchangesOp = void(std::string_view reason, std::optional<std::string_view> scope,
                             std::string_view group_name);

// Lets a kernel take an op's arguments as one struct: the dispatcher calls `Taken<Op,
// kernel>::call`.
template <class Op, auto kernel>
struct Taken;
template <class Result, class... Arguments, class Struct, Result (*kernel)(const Struct&)>
struct Taken<Result(Arguments...), kernel> {
  static Result call(Arguments... arguments) {
    return kernel({std::forward<Arguments>(arguments)...});
  }
};

[[nodiscard]] inline const c10::TypedOperatorHandle<WithStatisticsOp>& with_statistics_op() {
  static const auto op = op_named<WithStatisticsOp>("normscope::batch_norm_with_statistics");
  return op;
}

[[nodiscard]] inline const c10::TypedOperatorHandle<DoubleBackwardOp>& double_backward_op() {
  static const auto op = op_named<DoubleBackwardOp>("normscope::batch_norm_double_backward");
  return op;
}

}  // namespace normscope::binding
