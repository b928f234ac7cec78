// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "normscope/core/attributes.h"
#include "normscope/core/scope.h"

namespace normscope NORMSCOPE_EXPORT {

// Resolves norm_batch:M for `ranks` ranks with `samples` samples each; returns other scopes
// unchanged. The result is slices or local if a rank's own batch has M samples, otherwise the
// smallest group:K that has M samples, or world if no group has.
[[nodiscard]] Scope resolve_norm_batch(const Scope& scope, std::int64_t samples,
                                       std::int64_t ranks);

// For each rank, the first of the ranks with which it shares statistics (possibly itself).
// host_of_rank [ranks] holds any number that is the same for all ranks of a host. A single rank
// shares with itself, whatever the scope.
//
// Throws ArgumentError if the scope names more ranks than there are, or is norm_batch:M.
[[nodiscard]] std::vector<int> leaders_of(const Scope& scope,
                                          std::span<const std::int64_t> host_of_rank);

}  // namespace normscope
