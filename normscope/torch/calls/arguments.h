// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include "normscope/torch/tensors/op.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {

// The arguments of the ops that operators.cpp declares, each as one struct. all() returns them in
// the order of the schema, from which the C++ types of the ops follow.

// What torch's dispatcher looks at: the keys of all tensors among the arguments.
template <class Argument>
[[nodiscard]] c10::DispatchKeySet key_set_of(const Argument& argument) {
  if constexpr (std::is_same_v<Argument, at::Tensor>) return argument.key_set();
  if constexpr (std::is_same_v<Argument, OptionalTensor>) {
    if (argument) return argument->key_set();
  }
  return {};
}
template <class... Arguments>
[[nodiscard]] c10::DispatchKeySet keys_of(const std::tuple<const Arguments&...>& arguments) {
  return std::apply([](const Arguments&... each) { return (key_set_of(each) | ...); }, arguments);
}

// The type of an op, from the function that returns its arguments: it takes tensors by reference,
// and everything else by value.
template <class Argument>
using Passed = std::conditional_t<std::is_same_v<Argument, at::Tensor> ||
                                      std::is_same_v<Argument, OptionalTensor>,
                                  const Argument&, Argument>;
template <class Result, class Function>
struct OpWith;
template <class Result, class Struct, class... Arguments>
struct OpWith<Result, std::tuple<const Arguments&...> (Struct::*)() const> {
  using Type = Result(Passed<Arguments>...);
};

template <class Op, class... Arguments>
auto call_op(const c10::TypedOperatorHandle<Op>& op,
             const std::tuple<const Arguments&...>& arguments) {
  return std::apply([&](const Arguments&... each) { return op.call(each...); }, arguments);
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

  // Those that every op of a layer's forward begins with.
  [[nodiscard]] auto of_layer() const {
    return std::tie(x, weight, bias, running.mean, running.var, running.updates, momentum, eps,
                    dims, slice_stats, call.scope, call.group_name, call.layer, accumulated,
                    needs_backward);
  }
  [[nodiscard]] auto all() const {
    return std::tuple_cat(of_layer(), std::tie(activation.activation, activation.negative_slope,
                                               activation.residual, graph));
  }
};

// y, and the statistics that a backward needs. By this library's kernels: [slices, 3, C] float64,
// and two undefined tensors. By torch's, of ranks that share statistics: the mean, the spread and
// the counts (portable/batch_norm.h); of a rank alone: none.
using ForwardTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using ForwardOp = OpWith<ForwardTensors, decltype(&ForwardOpArguments::all)>::Type;

// Changes none of its arguments. Returns the statistics, the coefficients, and the new values of
// the running statistics and of `accumulated`, which are empty tensors if the argument is absent.
using StatisticsTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using StatisticsOp = OpWith<StatisticsTensors, decltype(&ForwardOpArguments::of_layer)>::Type;

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

  // Those that every op of a layer's backward begins with.
  [[nodiscard]] auto of_layer() const {
    return std::tie(dy, x, weight, statistics, wanted.dx, wanted.dweight, wanted.dbias, call.scope,
                    call.group_name, call.layer);
  }
  [[nodiscard]] auto all() const {
    return std::tuple_cat(of_layer(), std::tie(activation.activation, activation.negative_slope,
                                               activation.bias, activation.y, spread, counts));
  }
};

// The last one is the gradient of the residual; undefined without a residual.
using BackwardTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BackwardOp = OpWith<BackwardTensors, decltype(&BackwardOpArguments::all)>::Type;
using GradientSumsOp = OpWith<GradientTensors, decltype(&BackwardOpArguments::of_layer)>::Type;

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

  [[nodiscard]] auto all() const {
    return std::tie(grad_dx, grad_dweight, grad_dbias, dy, x, weight, statistics, call.scope,
                    call.group_name, call.layer, spread, counts);
  }
};
using DoubleBackwardOp = OpWith<GradientTensors, decltype(&DoubleBackwardOpArguments::all)>::Type;

struct WithStatisticsOpArguments {
  const at::Tensor& x;           // [N, C, *]
  const OptionalTensor& weight;  // [C]
  const OptionalTensor& bias;    // [C]
  const at::Tensor& statistics;  // this and the last two: ForwardTensors
  ActivationCall activation = {};
  const OptionalTensor& spread = kNoTensor;
  const OptionalTensor& counts = kNoTensor;

  [[nodiscard]] auto all() const {
    return std::tie(x, weight, bias, statistics, activation.activation, activation.negative_slope,
                    activation.residual, spread, counts);
  }
};
using WithStatisticsOp = OpWith<at::Tensor, decltype(&WithStatisticsOpArguments::all)>::Type;

// Finalizes the moments of a norm batch, which may be a sum of several tensors of moments.
struct FinalizeOpArguments {
  const at::Tensor& moments;  // [moments_size(C)] float64
  RunningTensors running;
  std::optional<double> momentum;  // none: cumulative average
  double eps;
  at::ScalarType dtype;  // of x

  [[nodiscard]] auto all() const {
    return std::tie(moments, running.mean, running.var, running.updates, momentum, eps, dtype);
  }
};
using FinalizeOp = OpWith<at::Tensor, decltype(&FinalizeOpArguments::all)>::Type;

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
