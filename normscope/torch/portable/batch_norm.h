// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "normscope/torch/calls/checks.h"
#include "normscope/torch/portable/statistics.h"

namespace normscope::binding {

// The layer by torch's own kernels, on any device: for tensors that uses_torch_kernels() accepts.
//
// A rank alone, and each slice, runs torch's batch norm, with torch's gradients. Ranks that share
// statistics send their means and variances once in forward, and their gradient sums once in
// backward. These sums are rounded to float32: unlike those of the library's own kernels, the
// results depend on the number of ranks in the last places (docs/numerics.md, "Torch's kernels").

// The ops portable_forward and portable_backward: the calls of ranks that share statistics.
// Returned: y; mean [C]; spread [C], the inverse standard deviation or, on devices without torch's
// synchronized kernels, the variance; counts, the elements per channel of each rank or their sum.
using PortableTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using PortableForwardOp = LayerForwardOp<PortableTensors>;
using PortableBackwardOp =
    LayerBackwardOp<GradientTensors, const at::Tensor&, const at::Tensor&, double>;

struct PortableBackwardArguments {
  const at::Tensor& dy;          // [N, C, *]
  const at::Tensor& x;           // [N, C, *]
  const OptionalTensor& weight;  // [C]
  const at::Tensor& mean;
  WantedGradients wanted;
  ScopedCall call;
  const at::Tensor& spread;
  const at::Tensor& counts;
  double eps;

  auto pass_to(const c10::TypedOperatorHandle<PortableBackwardOp>& op) const {
    return op.call(dy, x, weight, mean, wanted.dx, wanted.dweight, wanted.dbias, call.scope,
                   call.group_name, call.layer, spread, counts, eps);
  }
};

// torch.nn's layer, for a rank alone or for each slice; operations of torch, with their gradients.
[[nodiscard]] at::Tensor normalize_on_this_rank(const ForwardOpArguments& op, const Scope& scope);

// The slices of x, each of which has more than one element per channel or none.
[[nodiscard]] std::vector<at::Tensor> slices_of(const at::Tensor& x, const Slicing& slicing,
                                                std::string_view layer);
// Updates the buffers by the statistics of slices that are not empty, as the call wants it.
void update_by_slices(const ForwardOpArguments& op, const Slicing& slicing,
                      const std::vector<Statistics>& statistics);

// The ops batch_norm_statistics and batch_norm_gradient_sums of compiled graphs (ops/graph.h).
[[nodiscard]] StatisticsTensors portable_statistics(const ForwardOpArguments& op);
[[nodiscard]] GradientTensors portable_gradient_sums(const BackwardOpArguments& op);

[[nodiscard]] at::Tensor inv_std_of(const at::Tensor& x, const at::Tensor& spread, double eps);

// The statistics that other ops take, [1, 3, C].
[[nodiscard]] at::Tensor stored_statistics(const PortableBackwardArguments& op);

}  // namespace normscope::binding
