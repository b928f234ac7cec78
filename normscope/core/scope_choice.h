// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "normscope/core/attributes.h"
#include "normscope/core/independent_values.h"
#include "normscope/core/scope.h"

namespace normscope NORMSCOPE_EXPORT {

// The default number of independent values wanted of a norm batch; docs/recommending.md explains
// the choice.
inline constexpr double kDefaultIndependentValues = 4.0;

// A candidate scope for a layer, with the independent values of its norm batch.
struct ScopeCandidate {
  Scope scope = Scope::world();
  std::int64_t ranks = 1;                   // that share statistics
  std::optional<IndependentValues> values;  // nullopt: could not be measured
  bool extrapolated = false;                // whether they were extrapolated from those of `local`
};

struct ScopeChoice {
  std::vector<ScopeCandidate> candidates;  // from the narrowest to the widest
  std::size_t chosen = 0;                  // index into candidates
};

// Chooses the narrowest scope for which the lower end of the interval is at least `wanted`
// independent values, or `world` if there is none. The candidates are local, group:K for every K
// that divides the ranks (node if each of several hosts has K ranks), and world.
//
// `calls` has one entry per call of the layer in one forward of the model: the moments of its
// input, with one part per rank. Each call has its own statistics; the noisiest call decides.
// host_of_rank [ranks] holds any number that is the same for all ranks of a host. Errors name
// `layer`.
//
// Throws ArgumentError if a moment is not finite.
[[nodiscard]] ScopeChoice choose_scope(std::string_view layer, std::span<const PartMoments> calls,
                                       double eps, double wanted,
                                       std::span<const std::int64_t> host_of_rank);

}  // namespace normscope
