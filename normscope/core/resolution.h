// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "normscope/core/export.h"
#include "normscope/core/scope.h"

namespace normscope NORMSCOPE_EXPORT {

// What norm_batch:M stands for among `ranks` ranks with `samples` samples each; any other scope as
// it is. Slices or this rank alone where its own batch has M samples, else the smallest group:K
// that has them, world where none has.
[[nodiscard]] Scope resolve_norm_batch(const Scope& scope, std::int64_t samples,
                                       std::int64_t ranks);

// For each rank the first of those that it shares statistics with, itself among them. The host of
// each rank is any number that its ranks have in common; one rank shares with itself, whatever the
// scope.
//
// Throws ArgumentError where the scope names more ranks than there are, or is norm_batch:M.
[[nodiscard]] std::vector<int> leaders_of(const Scope& scope,
                                          std::span<const std::int64_t> host_of_rank);

}  // namespace normscope
