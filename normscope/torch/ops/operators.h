// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace normscope::binding {

// The C++ types of the ops that operators.cpp declares, and the arguments of each as one struct.
using OptionalTensor = std::optional<at::Tensor>;
using GradientTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
inline const OptionalTensor kNoTensor;

// A layer's call: the ranks that share its statistics, and its name in errors.
struct ScopedCall {
  std::string_view scope;
  std::string_view group_name;  // of a process group; "": none
  std::string_view layer;       // a qualified name; "": none
};

using ForwardOp = std::tuple<at::Tensor, at::Tensor>(
    const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, std::optional<double> momentum, double eps,
    at::IntArrayRef dims, std::string_view slice_stats, std::string_view scope,
    std::string_view group_name, std::string_view layer, const OptionalTensor& accumulated,
    std::optional<bool> needs_backward, std::optional<bool> decompose);

// The same without `decompose`. It changes none of its arguments. It returns the statistics, the
// coefficients, and the new values of the buffers and of `accumulated`, which are empty tensors if
// the argument is absent.
using StatisticsTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using StatisticsOp =
    StatisticsTensors(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& running_mean, const OptionalTensor& running_var,
                      const OptionalTensor& num_batches_tracked, std::optional<double> momentum,
                      double eps, at::IntArrayRef dims, std::string_view slice_stats,
                      std::string_view scope, std::string_view group_name, std::string_view layer,
                      const OptionalTensor& accumulated, std::optional<bool> needs_backward);

struct ForwardOpArguments {
  const at::Tensor& x;                        // [N, C, *]
  const OptionalTensor& weight;               // [C]
  const OptionalTensor& bias;                 // [C]
  const OptionalTensor& running_mean;         // [C]
  const OptionalTensor& running_var;          // [C]
  const OptionalTensor& num_batches_tracked;  // [] int64
  std::optional<double> momentum;             // none: cumulative average
  double eps;
  at::IntArrayRef dims;  // the numbers of dimensions that x may have; empty: any from 2
  std::string_view slice_stats;
  ScopedCall call;
  const OptionalTensor& accumulated = kNoTensor;  // [moments_size(C)] float64 += the moments
  std::optional<bool> needs_backward;             // nullopt: autograd decides
  std::optional<bool> decompose = std::nullopt;   // see graph.h

  auto pass_to(const c10::TypedOperatorHandle<ForwardOp>& op) const {
    return op.call(x, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps,
                   dims, slice_stats, call.scope, call.group_name, call.layer, accumulated,
                   needs_backward, decompose);
  }
  auto pass_to(const c10::TypedOperatorHandle<StatisticsOp>& op) const {
    return op.call(x, weight, bias, running_mean, running_var, num_batches_tracked, momentum, eps,
                   dims, slice_stats, call.scope, call.group_name, call.layer, accumulated,
                   needs_backward);
  }
};

// The operations after a layer: a residual is added, then an activation is applied ("relu",
// "relu6", "leaky_relu", "silu", "hard_swish" or "none").
struct ActivationCall {
  std::string_view activation = "none";
  double negative_slope = 0.0;                 // for leaky_relu
  const OptionalTensor& residual = kNoTensor;  // [N, C, *]
};

using ActivatedForwardOp = std::tuple<at::Tensor, at::Tensor>(
    std::string_view activation, double negative_slope, const OptionalTensor& residual,
    const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& num_batches_tracked, std::optional<double> momentum, double eps,
    at::IntArrayRef dims, std::string_view slice_stats, std::string_view scope,
    std::string_view group_name, std::string_view layer, const OptionalTensor& accumulated,
    std::optional<bool> needs_backward);

struct ActivatedForwardOpArguments {
  ActivationCall activation;
  ForwardOpArguments layer;

  auto pass_to(const c10::TypedOperatorHandle<ActivatedForwardOp>& op) const {
    return op.call(activation.activation, activation.negative_slope, activation.residual, layer.x,
                   layer.weight, layer.bias, layer.running_mean, layer.running_var,
                   layer.num_batches_tracked, layer.momentum, layer.eps, layer.dims,
                   layer.slice_stats, layer.call.scope, layer.call.group_name, layer.call.layer,
                   layer.accumulated, layer.needs_backward);
  }
};

using BackwardOp = GradientTensors(const at::Tensor& dy, const at::Tensor& x,
                                   const OptionalTensor& weight, const at::Tensor& statistics,
                                   bool wants_dx, bool wants_dweight, bool wants_dbias,
                                   std::string_view scope, std::string_view group_name,
                                   std::string_view layer);

struct WantedGradients {
  bool dx;
  bool dweight;
  bool dbias;
};

struct BackwardOpArguments {
  const at::Tensor& dy;          // [N, C, *]
  const at::Tensor& x;           // [N, C, *]
  const OptionalTensor& weight;  // [C]
  const at::Tensor& statistics;  // [slices, 3, C] float64
  WantedGradients wanted;
  ScopedCall call;

  auto pass_to(const c10::TypedOperatorHandle<BackwardOp>& op) const {
    return op.call(dy, x, weight, statistics, wanted.dx, wanted.dweight, wanted.dbias, call.scope,
                   call.group_name, call.layer);
  }
};

// The last one is the gradient of the residual.
using ActivatedGradientTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

using ActivatedBackwardOp = ActivatedGradientTensors(
    std::string_view activation, double negative_slope, const OptionalTensor& bias,
    const OptionalTensor& y, const at::Tensor& dy, const at::Tensor& x,
    const OptionalTensor& weight, const at::Tensor& statistics, bool wants_dx, bool wants_dweight,
    bool wants_dbias, std::string_view scope, std::string_view group_name, std::string_view layer);

struct ActivatedBackwardOpArguments {
  std::string_view activation;
  double negative_slope;
  const OptionalTensor& bias;  // [C]
  const OptionalTensor& y;     // [N, C, *] forward's, if it had a residual
  BackwardOpArguments layer;

  auto pass_to(const c10::TypedOperatorHandle<ActivatedBackwardOp>& op) const {
    return op.call(activation, negative_slope, bias, y, layer.dy, layer.x, layer.weight,
                   layer.statistics, layer.wanted.dx, layer.wanted.dweight, layer.wanted.dbias,
                   layer.call.scope, layer.call.group_name, layer.call.layer);
  }
};

using DoubleBackwardOp = GradientTensors(const OptionalTensor& grad_dx,
                                         const OptionalTensor& grad_dweight,
                                         const OptionalTensor& grad_dbias, const at::Tensor& dy,
                                         const at::Tensor& x, const OptionalTensor& weight,
                                         const at::Tensor& statistics, std::string_view scope,
                                         std::string_view group_name, std::string_view layer);

struct DoubleBackwardOpArguments {
  const OptionalTensor& grad_dx;       // [N, C, *]
  const OptionalTensor& grad_dweight;  // [C]
  const OptionalTensor& grad_dbias;    // [C]
  const at::Tensor& dy;                // [N, C, *]
  const at::Tensor& x;                 // [N, C, *]
  const OptionalTensor& weight;        // [C]
  const at::Tensor& statistics;        // [slices, 3, C] float64
  ScopedCall call;

  auto pass_to(const c10::TypedOperatorHandle<DoubleBackwardOp>& op) const {
    return op.call(grad_dx, grad_dweight, grad_dbias, dy, x, weight, statistics, call.scope,
                   call.group_name, call.layer);
  }
};

using WithStatisticsOp = at::Tensor(const at::Tensor& x, const OptionalTensor& weight,
                                    const OptionalTensor& bias, const at::Tensor& statistics,
                                    std::string_view activation, double negative_slope,
                                    const OptionalTensor& residual);

struct WithStatisticsOpArguments {
  const at::Tensor& x;           // [N, C, *]
  const OptionalTensor& weight;  // [C]
  const OptionalTensor& bias;    // [C]
  const at::Tensor& statistics;  // [slices, 3, C] float64
  ActivationCall activation = {};

  auto pass_to(const c10::TypedOperatorHandle<WithStatisticsOp>& op) const {
    return op.call(x, weight, bias, statistics, activation.activation, activation.negative_slope,
                   activation.residual);
  }
};

// Finalizes the moments of a norm batch, which may be a sum of several tensors of moments.
using FinalizeOp = at::Tensor(const at::Tensor& moments, const OptionalTensor& running_mean,
                              const OptionalTensor& running_var,
                              const OptionalTensor& num_batches_tracked,
                              std::optional<double> momentum, double eps, at::ScalarType dtype);

struct FinalizeOpArguments {
  const at::Tensor& moments;                  // [moments_size(C)] float64
  const OptionalTensor& running_mean;         // [C]
  const OptionalTensor& running_var;          // [C]
  const OptionalTensor& num_batches_tracked;  // [] int64
  std::optional<double> momentum;             // none: cumulative average
  double eps;
  at::ScalarType dtype;  // of x
};

using KeepOrderOp = std::vector<at::Tensor>(at::TensorList values);

using ResolveScopeOp = std::string(std::string_view scope, std::string_view group_name,
                                   std::int64_t samples);

using PartMomentsOp = at::Tensor(const at::Tensor& x, std::int64_t parts);

using FailExchangeOp = void(std::string_view scope, std::string_view group_name,
                            std::string_view reason);

using MakeProcessGroupOp = std::string(std::string_view name, std::string_view parent,
                                       at::IntArrayRef ranks, double seconds);

using CloseProcessGroupOp = void(std::string_view name);

using CheckSignalsOp = void();

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

// The op of this name, as operators.cpp declares it.
template <class Op>
[[nodiscard]] c10::TypedOperatorHandle<Op> op_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Op>();
}

[[nodiscard]] inline const c10::TypedOperatorHandle<WithStatisticsOp>& with_statistics_op() {
  static const auto op = op_named<WithStatisticsOp>("normscope::batch_norm_with_statistics");
  return op;
}

[[nodiscard]] inline OptionalTensor defined_or_none(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

}  // namespace normscope::binding
