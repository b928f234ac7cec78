// SPDX-License-Identifier: Apache-2.0
#include "normscope/core/resolution.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>

#include "normscope/core/error.h"

namespace normscope {
namespace {

[[noreturn]] void refuse(const Scope& scope, const std::string& expected, std::int64_t got) {
  throw ScopeError("scope: " + scope.str() + ": expected " + expected + ", got " +
                   std::to_string(got));
}

// Every rank is its own leader.
std::vector<int> alone(std::size_t ranks) {
  std::vector<int> leaders(ranks);
  std::iota(leaders.begin(), leaders.end(), 0);
  return leaders;
}

std::vector<int> leaders_of_groups(const Scope& scope, std::size_t ranks) {
  const auto most = static_cast<std::int64_t>(ranks);
  if (scope.count() > most) {
    refuse(scope, "at most the " + std::to_string(most) + " ranks there are", scope.count());
  }
  std::vector<int> leaders = alone(ranks);
  for (int& leader : leaders) leader -= leader % static_cast<int>(scope.count());
  return leaders;
}

std::vector<int> leaders_of_hosts(std::span<const std::int64_t> host_of_rank) {
  std::vector<int> leaders = alone(host_of_rank.size());
  std::unordered_map<std::int64_t, int> leader_of_host;
  for (int& leader : leaders) {
    const std::int64_t host = host_of_rank[static_cast<std::size_t>(leader)];
    leader = leader_of_host.try_emplace(host, leader).first->second;
  }
  return leaders;
}

std::vector<int> leaders_of_sets(const Scope& scope, std::size_t ranks) {
  const auto end = static_cast<std::int64_t>(ranks);
  std::vector<int> leaders = alone(ranks);
  for (const std::vector<std::int64_t>& set : scope.sets()) {
    const std::int64_t last = std::ranges::max(set);
    if (last >= end) refuse(scope, "ranks below " + std::to_string(end), last);
    const auto first = static_cast<int>(std::ranges::min(set));
    for (const std::int64_t rank : set) leaders[static_cast<std::size_t>(rank)] = first;
  }
  return leaders;
}

}  // namespace

Scope resolve_norm_batch(const Scope& scope, std::int64_t samples, std::int64_t ranks) {
  if (scope.kind() != Scope::Kind::kNormBatch) return scope;
  const std::int64_t wanted = scope.count();
  if (samples / wanted >= 2) return Scope::slices(samples / wanted);
  if (samples >= wanted) return Scope::local();
  if (samples <= 0 || (wanted - 1) / samples + 1 >= ranks) return Scope::world();
  return Scope::group((wanted - 1) / samples + 1);
}

std::vector<int> leaders_of(const Scope& scope, std::span<const std::int64_t> host_of_rank) {
  const std::size_t ranks = host_of_rank.size();
  if (ranks == 1) return alone(ranks);
  switch (scope.kind()) {
    case Scope::Kind::kSlices:
    case Scope::Kind::kLocal: return alone(ranks);
    case Scope::Kind::kGroup: return leaders_of_groups(scope, ranks);
    case Scope::Kind::kNode: return leaders_of_hosts(host_of_rank);
    case Scope::Kind::kRanks: return leaders_of_sets(scope, ranks);
    case Scope::Kind::kWorld: return std::vector<int>(ranks, 0);
    case Scope::Kind::kNormBatch: break;
  }
  throw ArgumentError("scope: expected a scope resolved by resolve_norm_batch, got " + scope.str());
}

}  // namespace normscope
