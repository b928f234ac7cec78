// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/portable/batch_norm.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/pointwise.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

// x - mean, in the type of the statistics [3, C].
at::Tensor centered(const at::Tensor& x, const at::Tensor& statistics) {
  return pointwise::centered(x.to(statistics.scalar_type()), along_channels(x, statistics[0]),
                             along_channels(x, statistics[1]));
}

at::Tensor normalized_by_stored(const WithStatisticsOpArguments& op) {
  check_arguments(op);
  const at::Tensor& statistics = op.statistics;
  check_slices(op.x, statistics);
  const std::int64_t slices = statistics.size(0);
  const std::vector<at::Tensor> x = op.x.chunk(slices);
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const at::Tensor of = statistics[static_cast<std::int64_t>(i)];
    const at::Tensor xhat = centered(x[i], of) * along_channels(x[i], of[2]);
    outputs.push_back(affine(xhat, op.weight, op.bias).to(op.x.scalar_type()));
  }
  return outputs.size() == 1 ? outputs.front() : at::cat(outputs);
}

}  // namespace

at::Tensor portable_moments(const at::Tensor& x) {
  const at::Tensor moments = at::zeros({moments_size(x.size(1))}, x.options().dtype(at::kDouble));
  if (x.numel() > 0) add_moments(moments, statistics_of(x));
  return moments;
}

at::Tensor portable_finalize(const FinalizeOpArguments& op) {
  const Statistics statistics = statistics_of_sums(sums_in(op.moments), op.moments.options());
  update_buffers(op.running, op.momentum, std::nullopt, statistics, /*may_be_too_small=*/true);
  return stored_statistics(statistics.mean, (statistics.var + op.eps).rsqrt());
}

GradientTensors portable_part_gradient_sums(const at::Tensor& dy, const at::Tensor& x,
                                            const at::Tensor& statistics) {
  const at::Tensor of = statistics[0];
  const auto [dbias, products] = gradient_sums(dy.to(of.scalar_type()), centered(x, of));
  const std::int64_t channels = x.size(1);
  const at::Tensor sums = at::zeros({moments_size(channels)}, of.options());
  sums.narrow(0, 0, channels).copy_(dbias);
  sums.narrow(0, kLimbs * channels, channels).copy_(products);
  sums[limbs_size(channels) + kCount].fill_(elements_per_channel(x).expect_int());
  const auto type = arithmetic_options(x).dtype();
  return {sums, (products * of[2]).to(type), dbias.to(type)};
}

at::Tensor portable_part_input_gradient(const at::Tensor& dy, const at::Tensor& x,
                                        const OptionalTensor& weight, const at::Tensor& statistics,
                                        const at::Tensor& sums) {
  const at::Tensor of = statistics[0];
  const at::Tensor totals = sums_in(sums);
  const std::int64_t channels = x.size(1);
  const InputGradientValues values(
      {totals.narrow(0, 0, channels), totals.narrow(0, channels, channels)},
      totals.narrow(0, 2 * channels, 1), of[2], weight);
  const at::Tensor dx = input_gradient(dy.to(of.scalar_type()), centered(x, of), values);
  return in_format_of(x, dx.to(x.scalar_type()));
}

at::Tensor portable_with_statistics(const WithStatisticsOpArguments& op) {
  at::Tensor y = op.spread ? portable_apply(op) : normalized_by_stored(op);
  if (op.activation.residual) y = y + *op.activation.residual;
  return in_format_of(op.x, activated(checked(op.activation, op.x), y));
}

}  // namespace normscope::binding
