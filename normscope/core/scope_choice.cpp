// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/scope_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "normscope/core/error.h"

namespace normscope {
namespace {

// The number of consecutive ranks per host; 0 if hosts differ, ranks of a host are not consecutive,
// or there is one host.
std::int64_t ranks_of_a_host(std::span<const std::int64_t> host_of_rank) {
  const auto ranks = static_cast<std::int64_t>(host_of_rank.size());
  const auto size = static_cast<std::int64_t>(std::ranges::count(host_of_rank, host_of_rank[0]));
  if (size == ranks || ranks % size != 0) return 0;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const std::int64_t host = host_of_rank[static_cast<std::size_t>(rank)];
    const std::int64_t first = host_of_rank[static_cast<std::size_t>(rank - rank % size)];
    if (host != first || std::ranges::count(host_of_rank, host) != size) return 0;
  }
  return size;
}

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

bool is_large_enough(const LayerNoise& layer, std::size_t candidate) {
  const CandidateNoise& measured = layer.candidates[candidate];
  return layer.is_trained && measured.samples >= kLeastSamples &&
         measured.elements >= kLeastElements;
}

// The narrowest candidate that is large enough; world if there is none.
std::size_t narrowest(const LayerNoise& layer) {
  const std::size_t world = layer.candidates.size() - 1;
  std::size_t candidate = 0;
  while (candidate < world && !is_large_enough(layer, candidate)) ++candidate;
  return candidate;
}

void check(std::span<const LayerNoise> layers) {
  for (const LayerNoise& layer : layers) {
    for (const CandidateNoise& candidate : layer.candidates) {
      const bool has_nan = std::ranges::any_of(candidate.noise, [](double x) { return x != x; });
      if (!has_nan) continue;
      throw ArgumentError(
          "batches: expected finite inputs and gradients of every layer, got NaN or infinity in " +
          (layer.layer.empty() ? "the model" : layer.layer));
    }
  }
}

}  // namespace

std::vector<ScopeCandidate> candidate_scopes(std::span<const std::int64_t> host_of_rank) {
  const auto ranks = static_cast<std::int64_t>(host_of_rank.size());
  std::vector<ScopeCandidate> candidates = {{Scope::local(), 1}};
  if (ranks == 1) return candidates;
  const std::int64_t size = ranks_of_a_host(host_of_rank);
  if (size > 1) candidates.push_back({Scope::node(), size});
  candidates.push_back({Scope::world(), ranks});
  return candidates;
}

double TotalNoise::upper() const noexcept {
  constexpr double kErrors = 1.645;  // one-sided 95 % of a normal distribution
  return standard_error > 0.0 ? mean + kErrors * standard_error : mean;
}

TotalNoise total_noise(std::span<const LayerNoise> layers, std::span<const std::size_t> chosen) {
  std::vector<double> of_batches;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const std::vector<double>& noise = layers[i].candidates[chosen[i]].noise;
    of_batches.resize(noise.size());
    for (std::size_t batch = 0; batch < noise.size(); ++batch) of_batches[batch] += noise[batch];
  }
  if (of_batches.empty()) return {};
  TotalNoise total{.mean = mean_of(of_batches)};
  if (of_batches.size() < 2 || std::isinf(total.mean)) return total;
  double squares = 0.0;
  for (const double noise : of_batches) squares += (noise - total.mean) * (noise - total.mean);
  const auto batches = static_cast<double>(of_batches.size());
  total.standard_error = std::sqrt(squares / (batches - 1.0) / batches);
  return total;
}

std::vector<std::size_t> choose_scopes(std::span<const LayerNoise> layers, double allowed) {
  check(layers);
  std::vector<std::size_t> chosen, order(layers.size());
  for (const LayerNoise& layer : layers) chosen.push_back(narrowest(layer));
  const std::vector<std::size_t> least = chosen;
  const auto fits = [&] { return total_noise(layers, chosen).upper() <= allowed; };
  const auto noise_per_byte = [&](std::size_t i) {
    return mean_of(layers[i].candidates[least[i]].noise) /
           static_cast<double>(layers[i].exchange_bytes);
  };
  std::iota(order.begin(), order.end(), 0U);
  std::ranges::stable_sort(order, std::ranges::greater{}, noise_per_byte);
  for (const std::size_t i : order) {
    if (fits()) break;
    chosen[i] = layers[i].candidates.size() - 1;
  }
  std::ranges::reverse(order);
  for (const std::size_t i : order) {
    const std::size_t wide = chosen[i];
    for (chosen[i] = least[i]; chosen[i] < wide && !fits(); ++chosen[i]) {
    }
  }
  return chosen;
}

}  // namespace normscope
