// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/independent_values.h"

#include <limits>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include "normscope/batch_norm/part_moments.h"
#include "normscope/core/independent_values.h"
#include "normscope/core/scope_choice.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/ops/arguments.h"
#include "normscope/torch/tensors/call_site.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {
namespace {

PartMoments moments_of(const at::Tensor& moments) {
  TORCH_CHECK_VALUE(moments.dim() == 3 && moments.scalar_type() == at::kDouble &&
                        moments.is_cpu() && moments.size(2) % 2 == 1,
                    "moments: expected float64 numbers [batches, parts, 1 + 2 C] on the CPU");
  const at::Tensor rows = moments.contiguous();
  const double* data = rows.const_data_ptr<double>();
  return {.batches = rows.size(0),
          .parts = rows.size(1),
          .channels = (rows.size(2) - 1) / 2,
          .rows = std::vector<double>(data, data + rows.numel())};
}

void set_row(double* row, const std::optional<IndependentValues>& values, bool extrapolated) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  const IndependentValues fields = values.value_or(IndependentValues{kNone, kNone, kNone, kNone});
  row[0] = fields.value;
  row[1] = fields.lower;
  row[2] = fields.upper;
  row[3] = fields.noisiest_tenth;
  row[4] = extrapolated ? 1.0 : 0.0;
}

}  // namespace

at::Tensor part_moments_of(const at::Tensor& x, std::int64_t parts) {
  check_dimensions(x, {});
  // Measured steps are rare, and not worth device kernels of their own.
  const at::Tensor on_host = x.detach().cpu();
  TORCH_CHECK_VALUE(dtype_of(on_host), "x: expected a floating-point type, got ",
                    on_host.scalar_type());
  const at::Tensor in_kernel_layout = in_layout_of(empty_output(on_host), on_host);
  CallSite site(on_host);
  site.prepare(on_host, 1);
  const PartMoments moments = as_torch([&] {
    return part_moments(view(in_kernel_layout), parts, default_kernels(), *site.alone().execution);
  });
  return at::tensor(moments.rows, at::kDouble).view({1, moments.parts, -1});
}

std::vector<double> independent_values_of(const at::Tensor& moments, std::int64_t ranks,
                                          double eps) {
  const PartMoments parts = moments_of(moments);
  TORCH_CHECK_VALUE(ranks >= 1 && parts.parts % ranks == 0, "ranks: expected a divisor of the ",
                    parts.parts, " parts, got ", ranks);
  const auto values = independent_values(joined(parts, ranks), eps);
  if (!values) return {};
  return {values->value, values->lower, values->upper, values->noisiest_tenth};
}

ScopeChoiceFields choose_scope_of(std::string_view layer, at::TensorList calls, double eps,
                                  double wanted, at::IntArrayRef host_of_rank) {
  const auto ranks = static_cast<std::int64_t>(host_of_rank.size());
  std::vector<PartMoments> moments;
  for (const at::Tensor& call : calls) {
    moments.push_back(moments_of(call));
    TORCH_CHECK_VALUE(moments.back().parts == ranks, "calls: expected moments of ", ranks,
                      " parts, got ", moments.back().parts);
  }
  TORCH_CHECK_VALUE(!moments.empty() && ranks > 0, "calls: expected at least one, got none");
  const ScopeChoice choice = as_torch([&] {
    return choose_scope(layer, moments, eps, wanted, {host_of_rank.data(), host_of_rank.size()});
  });
  std::vector<std::string> scopes;
  std::vector<std::int64_t> sizes;
  const at::Tensor values =
      at::empty({static_cast<std::int64_t>(choice.candidates.size()), 5}, at::kDouble);
  double* row = values.mutable_data_ptr<double>();
  for (const ScopeCandidate& candidate : choice.candidates) {
    scopes.push_back(candidate.scope.str());
    sizes.push_back(candidate.ranks);
    set_row(row, candidate.values, candidate.extrapolated);
    row += values.size(1);
  }
  return {static_cast<std::int64_t>(choice.chosen), scopes, sizes, values};
}

}  // namespace normscope::binding
