// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/scope_choice.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "normscope/core/error.h"

namespace normscope {
namespace {

void check_finite(std::string_view layer, const PartMoments& moments) {
  if (std::ranges::all_of(moments.rows, [](double value) { return std::isfinite(value); })) return;
  throw ArgumentError("batches: expected finite inputs of every layer, got NaN or infinity in " +
                      (layer.empty() ? std::string("the model") : std::string(layer)));
}

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

Scope scope_of(std::int64_t size, std::int64_t ranks, std::int64_t ranks_of_host) {
  if (size == 1) return Scope::local();
  if (size == ranks) return Scope::world();
  return size == ranks_of_host ? Scope::node() : Scope::group(size);
}

// The candidate of `size` ranks, with its independent values for one call.
ScopeCandidate measured(const PartMoments& moments, double eps, std::int64_t size) {
  ScopeCandidate candidate{.ranks = size, .values = independent_values(joined(moments, size), eps)};
  if (!candidate.values && size > 1) {
    candidate.values = independent_values(moments, eps);
    if (candidate.values) {
      candidate.values = times(*candidate.values, static_cast<double>(size));
      candidate.extrapolated = true;
    }
  }
  return candidate;
}

bool is_noisier(const ScopeCandidate& one, const ScopeCandidate& other) {
  if (!one.values || !other.values) return one.values.has_value();
  return one.values->value < other.values->value;
}

bool is_enough(const std::optional<IndependentValues>& values, double wanted) {
  if (!values) return false;
  return (std::isnan(values->lower) ? values->value : values->lower) >= wanted;
}

}  // namespace

ScopeChoice choose_scope(std::string_view layer, std::span<const PartMoments> calls, double eps,
                         double wanted, std::span<const std::int64_t> host_of_rank) {
  for (const PartMoments& moments : calls) check_finite(layer, moments);
  const auto ranks = static_cast<std::int64_t>(host_of_rank.size());
  const std::int64_t ranks_of_host = ranks_of_a_host(host_of_rank);
  ScopeChoice choice;
  for (std::int64_t size = 1; size <= ranks; ++size) {
    if (ranks % size != 0) continue;
    ScopeCandidate noisiest = measured(calls[0], eps, size);
    for (const PartMoments& moments : calls.subspan(1)) {
      const ScopeCandidate other = measured(moments, eps, size);
      if (is_noisier(other, noisiest)) noisiest = other;
    }
    noisiest.scope = scope_of(size, ranks, ranks_of_host);
    choice.candidates.push_back(noisiest);
  }
  const auto enough = std::ranges::find_if(
      choice.candidates, [&](const auto& each) { return is_enough(each.values, wanted); });
  const std::size_t last = choice.candidates.size() - 1;
  choice.chosen = std::min(static_cast<std::size_t>(enough - choice.candidates.begin()), last);
  return choice;
}

}  // namespace normscope
