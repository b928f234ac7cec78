// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/ops/output_noise.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "normscope/core/output_noise.h"
#include "normscope/core/scope_choice.h"
#include "normscope/torch/groups/exchanges.h"

namespace normscope::binding {
namespace {

std::span<const double> numbers_of(const at::Tensor& rows, std::int64_t i) {
  const auto size = static_cast<std::size_t>(rows.size(1));
  return {rows.const_data_ptr<double>() + i * rows.size(1), size};
}

std::span<const std::int64_t> span_of(at::IntArrayRef values) {
  return {values.data(), values.size()};
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

std::string label_of(std::string_view layer) {
  return layer.empty() ? "model" : std::string(layer);
}

// The rows [R, n] of all ranks, from those of this process [P, n].
at::Tensor rows_of_ranks(const at::Tensor& own, std::string_view group_name,
                         const std::string& what) {
  return gather(own.flatten(), group_name, "recommend_scopes, " + what).view({-1, own.size(1)});
}

// The sums over a part of a batch at a layer: x, and dz for the output of the normalization, both
// [N, C, *] or rows [n, C] of `samples` samples. Returns [2 + 4 C]: samples, elements per channel,
// means, variances, sums of dz, and sums of dz * (x - mean).
//
// Without dz, only the moments [2 + 2 C], also of an output of the network. All elements of a
// tensor with fewer than two dimensions, such as a loss, are of one channel.
at::Tensor part_sums(const at::Tensor& x, const OptionalTensor& dz, std::int64_t samples) {
  const at::Tensor values = by_channel(x);
  const auto count = static_cast<double>(values.size(1));
  const double divisor = std::max(count, 1.0);
  const at::Tensor means = values.sum(1) / divisor;
  const at::Tensor centred = values - means.unsqueeze(1);
  const at::Tensor sizes =
      at::tensor({static_cast<double>(samples), count}, at::TensorOptions(at::kDouble));
  std::vector<at::Tensor> of_channels = {means, centred.square().sum(1) / divisor};
  if (dz) {
    const at::Tensor gradients = by_channel(*dz);
    of_channels.push_back(gradients.sum(1));
    of_channels.push_back((gradients * centred).sum(1));
  }
  return at::cat({sizes, at::cat(of_channels).cpu()});
}

// The rows [n, C] of x [N, C, *] where the mask [N, 1, *] is true.
at::Tensor unmasked_rows(const at::Tensor& x, const at::Tensor& mask) {
  return x.movedim(1, -1).index({mask.squeeze(1)});
}

std::vector<PartMoments> moments_in(const at::Tensor& rows) {
  std::vector<PartMoments> moments;
  const std::int64_t channels = (rows.size(1) - 2) / 2;
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    moments.push_back(PartMoments::of(numbers_of(rows, i), channels));
  }
  return moments;
}

// The moments of each output, as rows of all ranks.
std::vector<at::Tensor> moments_of_ranks(at::TensorList outputs, std::string_view group_name) {
  std::vector<double> own;
  for (const at::Tensor& output : outputs) {
    own.push_back(output.dim() > 1 ? static_cast<double>(output.size(1)) : 1.0);
  }
  const at::Tensor channels =
      rows_of_ranks(at::tensor(own, at::kDouble).unsqueeze(0), group_name, "channels of outputs");
  std::vector<at::Tensor> moments;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const bool differ = channels.select(1, std::ssize(moments)).ne(own[i]).any().item<bool>();
    // Without channels in common, all elements are of one channel.
    const at::Tensor output = differ ? outputs[i].flatten() : outputs[i];
    const std::int64_t samples = output.dim() < 2 ? 1 : output.size(0);
    moments.push_back(
        rows_of_ranks(part_sums(output, kNoTensor, samples).unsqueeze(0), group_name, "outputs"));
  }
  return moments;
}

// What changes of an output are divided by. Infinity for one without elements, of which nothing
// changes.
double output_scale(const at::Tensor& moments) {
  const std::vector<PartMoments> of_ranks = moments_in(moments);
  const std::size_t channels = of_ranks[0].means.size();
  double largest = 0.0, elements = 0.0;
  for (const PartMoments& of_rank : of_ranks) {
    largest = std::max(largest, of_rank.count);
    elements += of_rank.count * static_cast<double>(channels);
  }
  if (elements == 0.0) return std::numeric_limits<double>::infinity();
  const bool are_scalars = channels == 1 && largest <= 1.0;
  const double deviation =
      are_scalars ? kScalarDeviation * moments.select(1, 2).abs().sum().item<double>() / elements
                  : std::sqrt(mean_variance(of_ranks));
  return deviation * std::sqrt(elements);
}

}  // namespace

Cotangents random_cotangents(at::TensorList outputs, std::int64_t batch,
                             std::string_view group_name, std::int64_t first, std::int64_t parts) {
  TORCH_CHECK_VALUE(!outputs.empty(), "outputs: expected at least one, got none");
  std::vector<double> scales;
  for (const at::Tensor& moments : moments_of_ranks(outputs, group_name)) {
    scales.push_back(output_scale(moments));
  }
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

at::Tensor output_noise(const at::Tensor& x, const OptionalTensor& dz, const OptionalTensor& mask,
                        const OptionalTensor& weight, double eps, double to_noise,
                        std::string_view layer, std::string_view group_name, std::int64_t first,
                        std::int64_t parts, at::IntArrayRef host_of_rank) {
  std::vector<at::Tensor> rows;
  const std::vector<at::Tensor> dz_parts = (dz ? *dz : at::zeros_like(x)).tensor_split(parts);
  const std::vector<at::Tensor> masks =
      mask ? mask->tensor_split(parts) : std::vector<at::Tensor>();
  for (const at::Tensor& part : x.tensor_split(parts)) {
    const std::size_t i = rows.size();
    rows.push_back(mask ? part_sums(unmasked_rows(part, masks[i]),
                                    unmasked_rows(dz_parts[i], masks[i]), part.size(0))
                        : part_sums(part, dz_parts[i], part.size(0)));
  }
  const at::Tensor own = at::stack(rows);
  const at::Tensor moments =
      rows_of_ranks(own.narrow(1, 0, 2 + 2 * x.size(1)), group_name, label_of(layer));
  const auto channels = static_cast<std::size_t>(x.size(1));
  std::vector<PartGradients> gradients;
  for (std::int64_t i = 0; i < parts; ++i) {
    const auto sums = numbers_of(own, i).subspan(2 + 2 * channels);
    gradients.push_back({.gradients = sums.first(channels), .products = sums.last(channels)});
  }
  std::vector<std::int64_t> sizes;
  for (const ScopeCandidate& candidate : candidate_scopes(span_of(host_of_rank))) {
    sizes.push_back(candidate.ranks);
  }
  const at::Tensor scale =
      weight ? weight->detach().cpu().to(at::kDouble).contiguous() : at::Tensor();
  const std::span<const double> weights =
      weight ? std::span(scale.const_data_ptr<double>(), channels) : std::span<const double>();
  std::vector<SizeNoise> noise = noise_of_sizes(
      moments_in(moments), gradients, static_cast<std::size_t>(first), sizes, weights, eps);
  // The last candidate is world, without noise; its NaN says that x is not finite.
  for (SizeNoise& of_size : std::span(noise).first(noise.size() - 1)) {
    of_size.noise = std::isfinite(to_noise) ? of_size.noise * to_noise : HUGE_VAL;
  }
  at::Tensor result = at::empty({std::ssize(noise), 3}, at::kDouble);
  double* row = result.mutable_data_ptr<double>();
  for (const SizeNoise& of_size : noise) {
    *row++ = of_size.noise;
    *row++ = of_size.samples;
    *row++ = of_size.elements;
  }
  return result;
}

ScopeChoice choose_scopes_of(const c10::List<std::string>& layers, at::IntArrayRef exchange_bytes,
                             at::ArrayRef<double> updates, at::ArrayRef<double> seconds,
                             at::TensorList noise, std::int64_t batches, double allowed,
                             std::string_view group_name, at::IntArrayRef host_of_rank) {
  ScopeChoice choice;
  auto& [scopes, ranks, measured, fewest_updates, mean_seconds, chosen, mean, standard_error] =
      choice;
  for (const ScopeCandidate& candidate : candidate_scopes(span_of(host_of_rank))) {
    scopes.push_back(candidate.scope.str());
    ranks.push_back(candidate.ranks);
  }
  std::vector<LayerNoise> of_layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const at::Tensor own = at::zeros({batches, std::ssize(scopes)}, at::kDouble);
    own.narrow(0, 0, noise[i].size(0)).copy_(noise[i].select(2, 0));
    const at::Tensor scalars = at::tensor({updates[i], seconds[i]}, at::TensorOptions(at::kDouble));
    const at::Tensor rows = rows_of_ranks(at::cat({own.flatten(), scalars}).unsqueeze(0),
                                          group_name, "noise of " + label_of(layers[i]));
    const at::Tensor of_all = rows.sum(0).narrow(0, 0, own.numel()).view(own.sizes());
    measured.push_back(at::cat({of_all.mean(0).unsqueeze(1), noise[i].narrow(2, 1, 2).amin(0)}, 1));
    fewest_updates.push_back(rows.select(1, -2).min().item<double>());
    mean_seconds.push_back(rows.select(1, -1).mean().item<double>());
    LayerNoise& layer = of_layers.emplace_back();
    layer.layer = layers[i];
    layer.exchange_bytes = exchange_bytes[i];
    layer.is_trained = fewest_updates.back() >= static_cast<double>(kTrainedUpdates);
    const at::Tensor by_candidate = of_all.t().contiguous();
    for (std::int64_t candidate = 0; candidate < std::ssize(scopes); ++candidate) {
      const auto of_batches = numbers_of(by_candidate, candidate);
      const auto of_candidate = numbers_of(measured.back(), candidate);
      layer.candidates.push_back({.noise = {of_batches.begin(), of_batches.end()},
                                  .samples = of_candidate[1],
                                  .elements = of_candidate[2]});
    }
  }
  const std::vector<std::size_t> indices = choose_scopes(of_layers, allowed);
  chosen.assign(indices.begin(), indices.end());
  const TotalNoise total = total_noise(of_layers, indices);
  mean = total.mean;
  standard_error = total.standard_error;
  return choice;
}

}  // namespace normscope::binding
