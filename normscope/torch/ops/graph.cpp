// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/graph.h"

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include "normscope/torch/calls/checks.h"
#include "normscope/torch/calls/recording.h"
#include "normscope/torch/tensors/pointwise.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

// The coefficients [slices, ., C] of the slices that a scope makes of x, in a shape that broadcasts
// over x.
class CoefficientsOf {
 public:
  CoefficientsOf(const at::Tensor& x, const at::Tensor& coefficients, const Scope& scope)
      : dims_(x.dim()) {
    if (scope.kind() != Scope::Kind::kSlices) {
      of_samples_ = coefficients;
      return;
    }
    const c10::SymInt samples = x.sym_size(0);
    const c10::SymInt slices = coefficients.sym_size(0);
    const c10::SymInt slice_size = ((samples + slices - 1) / slices).max(1);
    const at::Tensor numbers = at::arange(c10::Scalar(samples), x.options().dtype(at::kLong));
    of_samples_ = coefficients.index_select(0, numbers.floor_divide(c10::Scalar(slice_size)));
  }

  [[nodiscard]] at::Tensor operator[](std::int64_t number) const {
    at::Tensor values = of_samples_.select(1, number);  // [slices or N, C]
    for (std::int64_t dim = 2; dim < dims_; ++dim) values = values.unsqueeze(-1);
    return values;
  }

  // Converted to the type of the coefficients.
  [[nodiscard]] at::Tensor widened(const at::Tensor& x) const {
    return x.to(of_samples_.scalar_type());
  }

 private:
  std::int64_t dims_;
  at::Tensor of_samples_;  // [1 or N, ., C]
};

at::Tensor normalize(const at::Tensor& x, const CoefficientsOf& of) {
  const at::Tensor xmu = pointwise::centered(of.widened(x), of[0], of[1]);
  return pointwise::normalized(xmu, of[2], of[3]).to(x.scalar_type());
}

at::Tensor input_gradient(const at::Tensor& x, const at::Tensor& dy, const CoefficientsOf& of) {
  const at::Tensor xmu = pointwise::centered(of.widened(x), of[0], of[1]);
  return pointwise::input_gradient(of.widened(dy), xmu, of[3], of[4], of[2]).to(x.scalar_type());
}

// Ones if there is no weight, which gives the same results.
at::Tensor weight_of(const ForwardOpArguments& op) {
  if (op.weight) return *op.weight;
  return at::ones_symint({op.x.sym_size(1)}, arithmetic_options(op.x));
}

}  // namespace

const c10::TypedOperatorHandle<StatisticsOp>& statistics_op() {
  static const auto op = op_named<StatisticsOp>("normscope::batch_norm_statistics");
  return op;
}

ForwardTensors forward_in_graph(const ForwardOpArguments& op) {
  const Scope scope = parsed_scope(op.call.scope);
  const bool exchanges = exchanges_with_ranks(scope, op.call);
  const OptionalTensor weight = exchanges ? keep_order({weight_of(op)})[0] : op.weight;
  std::vector<at::Tensor> results =
      std::apply([](const auto&... tensors) { return std::vector<at::Tensor>{tensors...}; },
                 call_op(statistics_op(), op.with(weight, op.running, op.accumulated).of_layer()));
  if (exchanges) results = keep_order(results);
  const at::Tensor& statistics = results[0];
  const at::Tensor& coefficients = results[1];
  std::size_t next = 2;
  for (const OptionalTensor* buffer : op.running.all()) set_buffer(*buffer, results[next++]);
  set_buffer(op.accumulated, results[next]);
  if (!op.decomposes()) {
    const WithStatisticsOpArguments again{op.x, op.weight, op.bias, statistics, op.activation};
    return {call_op(with_statistics_op(), again.all()), statistics, {}, {}};
  }
  return {normalize(op.x, CoefficientsOf(op.x, coefficients, scope)), statistics, {}, {}};
}

BackwardTensors backward_in_graph(const BackwardOpArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Scope scope = parsed_scope(op.call.scope);
  const bool exchanges = exchanges_with_ranks(scope, op.call);
  const at::Tensor statistics = exchanges ? keep_order({op.statistics})[0] : op.statistics;
  static const auto sums_op = op_named<GradientSumsOp>("normscope::batch_norm_gradient_sums");
  const BackwardOpArguments with_statistics{op.dy, op.x, op.weight, statistics, op.wanted, op.call};
  auto [coefficients, dweight, dbias] = call_op(sums_op, with_statistics.of_layer());
  if (exchanges) {
    const std::vector<at::Tensor> kept = keep_order({coefficients, dweight, dbias});
    std::tie(coefficients, dweight, dbias) = std::tie(kept[0], kept[1], kept[2]);
  }
  return backward_by_coefficients(op, {coefficients, dweight, dbias});
}

BackwardTensors backward_by_coefficients(const BackwardOpArguments& op,
                                         const GradientTensors& sums) {
  const auto& [coefficients, dweight, dbias] = sums;
  if (!op.wanted.dx) return {at::empty({0}, op.x.options()), dweight, dbias, {}};
  const CoefficientsOf of(op.x, coefficients, parsed_scope(op.call.scope));
  return {input_gradient(op.x, op.dy, of), dweight, dbias, {}};
}

}  // namespace normscope::binding
