// SPDX-License-Identifier: Apache-2.0
//
// The layer by torch's kernels in a compiled graph.
#include <optional>
#include <string_view>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "normscope/torch/calls/checks.h"
#include "normscope/torch/calls/recording.h"
#include "normscope/torch/calls/run_with_exchange.h"
#include "normscope/torch/calls/scope_changes.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/kernels_in_use.h"
#include "normscope/torch/tensors/results.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {
namespace {

using SumOp = at::Tensor(const at::Tensor&, c10::SymInt, std::optional<bool>, double,
                         std::optional<double>, std::string_view, std::string_view,
                         std::string_view);

// What the ranks compare when they add their tensors.
struct SumArguments {
  const at::Tensor& own;                 // [k]
  c10::SymInt count;                     // elements per channel
  std::optional<bool> backward_follows;  // none: this is the backward
  double eps;
  std::optional<double> momentum;
  ScopedCall call;

  [[nodiscard]] at::Tensor in_order() const {
    static const auto op = op_named<SumOp>("normscope::portable_sum");
    const at::Tensor kept = keep_order({own})[0];
    return keep_order({op.call(kept, count, backward_follows, eps, momentum, call.scope,
                               call.group_name, call.layer)})[0];
  }
};

at::Tensor sum(const SumArguments& op) {
  const bool is_forward = op.backward_follows.has_value();
  if (is_forward) note_forward_in_graph(op.call.layer);
  const Direction direction = is_forward ? Direction::kForward : Direction::kBackward;
  const CallLabel label{
      .layer = op.call.layer,
      .scope = op.call.scope,
      .kernels = "torch in a graph",
      .direction = direction,
      .channels = op.own.size(0) / 2,
      .dtype = dtype_name_of(op.own),  // x's is not known here; this one decides the length
      .backward = op.backward_follows.value_or(true) ? BackwardNeeded::kYes : BackwardNeeded::kNo,
      .eps = op.eps,
      .momentum = op.momentum.value_or(kCumulativeAverage)};
  return run_with_message(op.own, direction, op.call, [&](TensorMessage& message) {
    return message.sum(label, op.count.expect_int(), op.own.clone());
  });
}

at::Tensor sum_meta(const SumArguments& op) { return at::empty_like(op.own); }

}  // namespace

PortableTensors portable_forward_in_graph(const ForwardOpArguments& op) {
  static_cast<void>(checked(op, parsed_scope(op.call.scope)));
  const at::Tensor& x = op.x;
  const c10::SymInt count = elements_per_channel(x);
  const at::TensorOptions options = arithmetic_options(x);
  const bool is_empty = count == 0;
  at::Tensor sums = at::zeros_symint({2 * x.sym_size(1) + 1}, float64_options(x));
  if (!is_empty) {
    Statistics own = statistics_of(x);
    own.count = at::scalar_tensor(c10::Scalar(count), sums.options());
    sums = sums_of(own, sums.scalar_type());
  }
  sums = SumArguments{sums, count, op.needs_backward.value_or(false), op.eps, op.momentum, op.call}
             .in_order();
  const Statistics all = statistics_of_sums(sums, options);
  update_buffers(op.running, op.momentum, op.accumulated, all, /*may_be_too_small=*/count < 2);
  const at::Tensor inv_std = (all.var + op.eps).rsqrt();
  const at::Tensor xhat =
      (x.to(options.dtype()) - along_channels(x, all.mean)) * along_channels(x, inv_std);
  const at::Tensor y = affine(xhat, op.weight, op.bias);
  return {y.to(x.scalar_type()), all.mean, has_synchronized_kernels(x) ? inv_std : all.var,
          all.count};
}

GradientTensors portable_backward_in_graph(const PortableBackwardArguments& op) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const GradientSums own = gradient_sums_of(op);
  const at::Tensor message = at::cat({own.dy, own.dy_xmu});
  const at::Tensor totals =
      SumArguments{message, elements_per_channel(op.x), std::nullopt, 0.0, std::nullopt, op.call}
          .in_order();
  const c10::SymInt channels = op.x.sym_size(1);
  const at::Tensor none = at::empty({0}, op.x.options());
  const at::Tensor inv_std = inv_std_of(op.x, op.spread, op.eps);
  return {op.wanted.dx ? input_gradient_of(op, {totals.narrow_symint(0, 0, channels),
                                                totals.narrow_symint(0, channels, channels)})
                       : none,
          op.wanted.dweight ? own.dy_xmu * inv_std : none, op.wanted.dbias ? own.dy : none};
}

TORCH_LIBRARY_IMPL(normscope, CompositeExplicitAutograd, m) {
  m.impl("portable_sum", &Taken<SumOp, &sum>::call);
}
TORCH_LIBRARY_IMPL(normscope, Meta, m) { m.impl("portable_sum", &Taken<SumOp, &sum_meta>::call); }

}  // namespace normscope::binding
