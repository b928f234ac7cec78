// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "normscope/core/export.h"
#include "normscope/core/independent_values.h"
#include "normscope/core/scope.h"

namespace normscope NORMSCOPE_EXPORT {

// What a norm batch should be worth where nothing else is said; docs/recommending.md says what it
// was chosen from.
inline constexpr double kDefaultIndependentValues = 4.0;

// A scope that a layer may get, and what its statistics would be worth.
struct ScopeCandidate {
  Scope scope = Scope::world();
  std::int64_t ranks = 1;                   // that share
  std::optional<IndependentValues> values;  // none: could not be measured
  bool extrapolated = false;                // whether they follow from those of `local`
};

struct ScopeChoice {
  std::vector<ScopeCandidate> candidates;  // from the narrowest to the widest
  std::size_t chosen = 0;                  // of them
};

// The narrowest scope whose norm batch is worth `wanted` independent values with the lower end of
// its interval, or `world` where none is: local, group:K where K divides the ranks (node where that
// is what each of several hosts holds), world.
//
// `calls` are the moments of what the layer was given in a forward of the model, call by call: each
// call has statistics of its own, and the noisiest one counts. The parts of each are the ranks, of
// which host_of_rank names the hosts by any number that their ranks have in common. `layer` is
// named in errors.
//
// Throws ArgumentError if a moment is not finite.
[[nodiscard]] ScopeChoice choose_scope(std::string_view layer, std::span<const PartMoments> calls,
                                       double eps, double wanted,
                                       std::span<const std::int64_t> host_of_rank);

}  // namespace normscope
