// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
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

// The statistics of a norm batch as torch's kernels take them: the last three of ForwardTensors.
struct PortableStatistics {
  [[nodiscard]] at::Tensor inv_std(const at::Tensor& x) const;
  // As the library's own kernels keep them, [1, 3, C].
  [[nodiscard]] at::Tensor stored(const at::Tensor& x) const;

  at::Tensor mean;    // [C]
  at::Tensor spread;  // [C] inv_std; without torch's synchronized kernels, the variance plus eps
  at::Tensor counts;  // the elements per channel of each rank, or their sum
};

// Those in the arguments of an op that has a spread.
template <class Arguments>
[[nodiscard]] PortableStatistics portable_statistics_of(const Arguments& op) {
  return {op.statistics, *op.spread, op.counts.value_or(at::Tensor())};
}

// Forward and backward of ranks that share statistics.
[[nodiscard]] ForwardTensors portable_forward(const ForwardOpArguments& op);
[[nodiscard]] BackwardTensors portable_backward(const BackwardOpArguments& op);
// The same y again. The activation is not applied.
[[nodiscard]] at::Tensor portable_apply(const WithStatisticsOpArguments& op);

// torch.nn's layer, for a rank alone or for each slice; operations of torch, with their gradients.
[[nodiscard]] at::Tensor normalize_on_this_rank(const ForwardOpArguments& op, const Scope& scope);

// The slices of x, each of which has more than one element per channel or none.
[[nodiscard]] std::vector<at::Tensor> slices_of(const at::Tensor& x, const Slicing& slicing,
                                                std::string_view layer);
// Updates the buffers by the statistics of slices that are not empty, as the call wants it.
void update_by_slices(const ForwardOpArguments& op, const Slicing& slicing,
                      const std::vector<Statistics>& statistics);

// The ops batch_norm_statistics and batch_norm_gradient_sums of compiled graphs (ops/graph.h). The
// first one updates the buffers of `op`.
struct GraphStatistics {
  at::Tensor statistics;    // [slices, 3, C] float64
  at::Tensor coefficients;  // [slices, 4, C] in the type of the arithmetic
};
[[nodiscard]] GraphStatistics portable_statistics(const ForwardOpArguments& op);
[[nodiscard]] GradientTensors portable_gradient_sums(const BackwardOpArguments& op);

// The ops of batch_norm/moments.h, and a forward from its statistics, by operations of torch.
// Arguments are checked already.

[[nodiscard]] at::Tensor portable_moments(const at::Tensor& x);
[[nodiscard]] at::Tensor portable_finalize(const FinalizeOpArguments& op);
[[nodiscard]] GradientTensors portable_part_gradient_sums(const at::Tensor& dy, const at::Tensor& x,
                                                          const at::Tensor& statistics);
[[nodiscard]] at::Tensor portable_part_input_gradient(const at::Tensor& dy, const at::Tensor& x,
                                                      const OptionalTensor& weight,
                                                      const at::Tensor& statistics,
                                                      const at::Tensor& sums);
[[nodiscard]] at::Tensor portable_with_statistics(const WithStatisticsOpArguments& op);

}  // namespace normscope::binding
