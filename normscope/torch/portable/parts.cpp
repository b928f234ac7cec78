// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/portable/parts.h"

#include <cstdint>
#include <iterator>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "normscope/core/error.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"
#include "normscope/torch/ops/activation.h"
#include "normscope/torch/ops/arguments.h"
#include "normscope/torch/portable/statistics.h"
#include "normscope/torch/tensors/results.h"

namespace normscope::binding {
namespace {

// x - mean, in the type of the statistics [3, C].
at::Tensor centered(const at::Tensor& x, const at::Tensor& statistics) {
  return (x.to(statistics.scalar_type()) - along_channels(x, statistics[0])) -
         along_channels(x, statistics[1]);
}

}  // namespace

at::Tensor portable_moments(const at::Tensor& x) {
  const at::Tensor moments = at::zeros({moments_size(x.size(1))}, float64_options(x));
  if (x.numel() > 0) add_moments(moments, statistics_of(x));
  return moments;
}

at::Tensor portable_finalize(const FinalizeOpArguments& op) {
  const Statistics statistics = statistics_of_sums(sums_in(op.moments), op.moments.options());
  update_buffers(op.running, op.momentum, std::nullopt, statistics, /*may_be_empty=*/true);
  const at::Tensor inv_std = (statistics.var + op.eps).rsqrt();
  return at::stack({statistics.mean, at::zeros_like(statistics.mean), inv_std}).unsqueeze(0);
}

GradientTensors portable_part_gradient_sums(const at::Tensor& dy, const at::Tensor& x,
                                            const at::Tensor& statistics) {
  const at::Tensor of = statistics[0];
  const at::Tensor wide = dy.to(of.scalar_type());
  const at::Tensor dbias = sum_per_channel(wide);
  const at::Tensor products = sum_per_channel(wide * centered(x, of));
  const std::int64_t channels = x.size(1);
  const at::Tensor sums = at::zeros({moments_size(channels)}, of.options());
  sums.narrow(0, 0, channels).copy_(dbias);
  sums.narrow(0, kLimbs * channels, channels).copy_(products);
  sums[limbs_size(channels) + kCount].fill_(static_cast<double>(elements_per_channel(x)));
  const auto type = arithmetic_options(x).dtype();
  return {sums, (products * of[2]).to(type), dbias.to(type)};
}

at::Tensor portable_part_input_gradient(const at::Tensor& dy, const at::Tensor& x,
                                        const OptionalTensor& weight, const at::Tensor& statistics,
                                        const at::Tensor& sums) {
  const at::Tensor of = statistics[0];
  const at::Tensor totals = sums_in(sums);
  const std::int64_t channels = x.size(1);
  const at::Tensor means = totals.narrow(0, 0, 2 * channels) / totals.narrow(0, 2 * channels, 1);
  const at::Tensor scale = weight ? of[2] * *weight : of[2];
  const at::Tensor slope = of[2] * of[2] * means.narrow(0, channels, channels);
  const at::Tensor dx = (dy.to(of.scalar_type()) - along_channels(x, means.narrow(0, 0, channels)) -
                         centered(x, of) * along_channels(x, slope)) *
                        along_channels(x, scale);
  return dx.to(x.scalar_type());
}

at::Tensor portable_with_statistics(const WithStatisticsOpArguments& op) {
  const std::int64_t slices = op.statistics.size(0);
  const std::vector<at::Tensor> x = op.x.chunk(slices);
  TORCH_CHECK(std::ssize(x) == slices, "statistics: expected those of slices of x, got ", slices,
              " for ", op.x.size(0), " samples");
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const at::Tensor of = op.statistics[static_cast<std::int64_t>(i)];
    at::Tensor y = centered(x[i], of) * along_channels(x[i], of[2]);
    if (op.weight) y = y * along_channels(y, *op.weight);
    if (op.bias) y = y + along_channels(y, *op.bias);
    outputs.push_back(y.to(op.x.scalar_type()));
  }
  at::Tensor y = outputs.size() == 1 ? outputs.front() : at::cat(outputs);
  if (op.activation.residual) y = y + *op.activation.residual;
  return activated(checked(op.activation, op.x), y);
}

}  // namespace normscope::binding
