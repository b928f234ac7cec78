// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/output_noise.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>

#include "normscope/core/output_noise.h"
#include "normscope/core/scope_choice.h"
#include "normscope/torch/errors.h"

namespace normscope::binding {
namespace {

std::span<const double> numbers_of(const at::Tensor& rows, std::int64_t i) {
  const auto size = static_cast<std::size_t>(rows.size(1));
  return {rows.const_data_ptr<double>() + i * rows.size(1), size};
}

std::span<const std::int64_t> span_of(at::IntArrayRef values) {
  return {values.data(), values.size()};
}

void check_rows(const char* name, const at::Tensor& rows, std::int64_t size) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.scalar_type() == at::kDouble && rows.is_cpu() &&
                        rows.is_contiguous() && rows.size(1) == size,
                    name, ": expected contiguous float64 rows of ", size, " on the CPU, got ",
                    rows.scalar_type(), " ", rows.sizes());
}

// [channels, elements] in float64.
at::Tensor by_channel(const at::Tensor& x) {
  const at::Tensor detached = x.dim() < 2 ? x.detach().reshape({-1, 1}) : x.detach();
  return detached.to(at::kDouble).transpose(0, 1).flatten(1);
}

// The standard deviation of a scalar, as a share of its value.
constexpr double kScalarDeviation = 0.1;

bool is_scalar(const at::Tensor& output) { return output.dim() == 0 || output.numel() == 1; }

at::Tensor signs(const at::Tensor& like, std::uint64_t number) {
  // The generator reads 32 bits of its seed. An odd factor spreads the others over them.
  constexpr std::uint64_t kFactor = 0x9E3779B1;
  const auto generator = at::detail::createCPUGenerator(number + (number >> 32) * kFactor);
  return 2.0 * at::randint(0, 2, like.sizes(), generator, at::kFloat) - 1.0;
}

PartMoments moments_in(const at::Tensor& rows, std::int64_t i, std::int64_t channels) {
  return PartMoments::of(numbers_of(rows, i), channels);
}

// What changes of an output are divided by. Infinity for one without elements, of which nothing
// changes.
double output_scale(const at::Tensor& moments) {
  const std::int64_t channels = (moments.size(1) - 2) / 2;
  check_rows("moments", moments, 2 + 2 * channels);
  std::vector<PartMoments> of_ranks;
  double largest = 0.0, elements = 0.0;
  for (std::int64_t rank = 0; rank < moments.size(0); ++rank) {
    of_ranks.push_back(moments_in(moments, rank, channels));
    largest = std::max(largest, of_ranks.back().count);
    elements += of_ranks.back().count * static_cast<double>(channels);
  }
  if (elements == 0.0) return std::numeric_limits<double>::infinity();
  const bool are_scalars = channels == 1 && largest <= 1.0;
  const double deviation =
      are_scalars ? kScalarDeviation * moments.select(1, 2).abs().sum().item<double>() / elements
                  : std::sqrt(mean_variance(of_ranks));
  return deviation * std::sqrt(elements);
}

}  // namespace

Cotangents random_cotangents(at::TensorList outputs, at::TensorList moments, std::int64_t batch,
                             std::int64_t first, std::int64_t parts) {
  TORCH_CHECK_VALUE(!outputs.empty() && outputs.size() == moments.size(),
                    "moments: expected those of each of ", outputs.size(), " outputs, got ",
                    moments.size());
  std::vector<double> scales;
  for (const at::Tensor& of_output : moments) scales.push_back(output_scale(of_output));
  // The smallest is infinite if no output has elements.
  const double smallest = std::ranges::min(scales);
  const bool varies = smallest > 0.0 && std::isfinite(smallest);
  if (!varies) std::ranges::fill(scales, 1.0);
  const auto counting = static_cast<double>(
      std::ranges::count_if(scales, [](double scale) { return std::isfinite(scale); }));
  // What cannot be cut is the mean of the shares, each of which changes it by a part only.
  const auto is_cut = [parts](const at::Tensor& output) {
    return parts > 1 && !is_scalar(output) && output.size(0) >= parts;
  };
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto shares = static_cast<double>(is_cut(outputs[i]) ? 1 : parts);
    scales[i] *= std::sqrt(counting / shares);
  }
  // Numbers near 1 neither overflow nor vanish in float16. A power of two changes no bits.
  const double unit = std::exp2(std::ceil(std::log2(std::ranges::min(scales))));
  std::vector<at::Tensor> cotangents;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    // The same in a world of any size.
    constexpr std::int64_t kMostRanks = std::int64_t{1} << 24;
    const auto number = [&](std::int64_t part) {
      return static_cast<std::uint64_t>(batch * kMostRanks + first + part) * outputs.size() + i;
    };
    at::Tensor sign;
    if (is_cut(output)) {
      std::vector<at::Tensor> of_parts;
      for (const at::Tensor& share : output.tensor_split(parts)) {
        of_parts.push_back(signs(share, number(std::ssize(of_parts))));
      }
      sign = at::cat(of_parts);
    } else {
      sign = signs(output, number(0));
    }
    cotangents.push_back((sign / (scales[i] / unit)).to(output.options()));
  }
  const double to_noise = varies ? 1.0 / (unit * unit) : std::numeric_limits<double>::infinity();
  return {std::move(cotangents), to_noise};
}

at::Tensor part_sums(const at::Tensor& x, const std::optional<at::Tensor>& dz,
                     std::optional<std::int64_t> samples) {
  TORCH_CHECK_VALUE(!dz || (x.dim() >= 2 && x.sizes() == dz->sizes()),
                    "dz: expected the shape of x [N, C, *], got ",
                    dz ? dz->sizes() : at::IntArrayRef(), " for ", x.sizes());
  const at::Tensor values = by_channel(x);
  const auto count = static_cast<double>(values.size(1));
  const double divisor = std::max(count, 1.0);
  const at::Tensor means = values.sum(1) / divisor;
  const at::Tensor centred = values - means.unsqueeze(1);
  const std::int64_t of_x = x.dim() < 2 ? 1 : x.size(0);
  const at::Tensor sizes = at::tensor({static_cast<double>(samples.value_or(of_x)), count},
                                      at::TensorOptions(at::kDouble));
  std::vector<at::Tensor> of_channels = {means, centred.square().sum(1) / divisor};
  if (dz) {
    const at::Tensor gradients = by_channel(*dz);
    of_channels.push_back(gradients.sum(1));
    of_channels.push_back((gradients * centred).sum(1));
  }
  return at::cat({sizes, at::cat(of_channels).cpu()});
}

at::Tensor output_noise(const at::Tensor& own, const at::Tensor& moments, std::int64_t first,
                        const std::optional<at::Tensor>& weight, double eps,
                        at::IntArrayRef host_of_rank) {
  TORCH_CHECK_VALUE(own.dim() == 2 && own.size(1) % 4 == 2, "own: expected rows [2 + 4 C], got ",
                    own.sizes());
  const std::int64_t channels = (own.size(1) - 2) / 4;
  check_rows("own", own, 2 + 4 * channels);
  check_rows("moments", moments, 2 + 2 * channels);
  const auto ranks = static_cast<std::int64_t>(host_of_rank.size());
  TORCH_CHECK_VALUE(moments.size(0) == ranks && first >= 0 && first + own.size(0) <= ranks,
                    "moments: expected one row for each of ", ranks, " ranks, got ",
                    moments.size(0), ", with ", own.size(0), " from rank ", first, " on");
  std::vector<PartMoments> of_ranks;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    of_ranks.push_back(moments_in(moments, rank, channels));
  }
  std::vector<PartGradients> of_own;
  const auto size = static_cast<std::size_t>(channels);
  for (std::int64_t i = 0; i < own.size(0); ++i) {
    const auto sums = numbers_of(own, i).subspan(2 + 2 * size);
    of_own.push_back({.gradients = sums.first(size), .products = sums.last(size)});
  }
  std::vector<std::int64_t> sizes;
  for (const ScopeCandidate& candidate : candidate_scopes(span_of(host_of_rank))) {
    sizes.push_back(candidate.ranks);
  }
  const at::Tensor scale =
      weight ? weight->detach().cpu().to(at::kDouble).contiguous() : at::Tensor();
  TORCH_CHECK_VALUE(!weight || scale.numel() == channels, "weight: expected ", channels,
                    " channels, got ", scale.numel());
  const std::span<const double> weights =
      weight ? std::span(scale.const_data_ptr<double>(), size) : std::span<const double>();
  const std::vector<SizeNoise> noise =
      noise_of_sizes(of_ranks, of_own, static_cast<std::size_t>(first), sizes, weights, eps);
  at::Tensor result = at::empty({std::ssize(noise), 3}, at::kDouble);
  double* row = result.mutable_data_ptr<double>();
  for (const SizeNoise& of_size : noise) {
    *row++ = of_size.noise;
    *row++ = of_size.samples;
    *row++ = of_size.elements;
  }
  return result;
}

std::vector<double> limits_of_scopes() {
  return {kDefaultOutputNoise, kLeastSamples, kLeastElements, static_cast<double>(kTrainedUpdates)};
}

ChoiceFields choose_scopes_of(at::IntArrayRef host_of_rank, const c10::List<std::string>& layers,
                              at::IntArrayRef exchange_bytes, const c10::List<bool>& trained,
                              at::TensorList noise, at::TensorList sizes, double allowed) {
  TORCH_CHECK_VALUE(!host_of_rank.empty(), "host_of_rank: expected at least one rank, got none");
  std::vector<std::string> scopes;
  std::vector<std::int64_t> ranks;
  for (const ScopeCandidate& candidate : candidate_scopes(span_of(host_of_rank))) {
    scopes.push_back(candidate.scope.str());
    ranks.push_back(candidate.ranks);
  }
  std::vector<LayerNoise> measured;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::int64_t candidates = sizes[i].size(0), batches = noise[i].size(0);
    check_rows("noise", noise[i], candidates);
    check_rows("sizes", sizes[i], 2);
    LayerNoise layer{
        .layer = layers[i],
        .exchange_bytes = exchange_bytes[i],
        .is_trained = trained[i],
        .candidates = std::vector<CandidateNoise>(static_cast<std::size_t>(candidates))};
    for (std::int64_t k = 0; k < candidates; ++k) {
      CandidateNoise& candidate = layer.candidates[static_cast<std::size_t>(k)];
      for (std::int64_t batch = 0; batch < batches; ++batch) {
        candidate.noise.push_back(numbers_of(noise[i], batch)[static_cast<std::size_t>(k)]);
      }
      candidate.samples = numbers_of(sizes[i], k)[0];
      candidate.elements = numbers_of(sizes[i], k)[1];
    }
    measured.push_back(std::move(layer));
  }
  const std::vector<std::size_t> chosen =
      as_torch([&] { return choose_scopes(measured, allowed); });
  const TotalNoise total = total_noise(measured, chosen);
  return {std::move(scopes), std::move(ranks),
          std::vector<std::int64_t>(chosen.begin(), chosen.end()), total.mean,
          total.standard_error};
}

}  // namespace normscope::binding
