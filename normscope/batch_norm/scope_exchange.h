// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/export.h"
#include "normscope/core/scope.h"

namespace normscope NORMSCOPE_EXPORT {

// The ranks of a group find out together how a scope divides them. All that is here is collective
// over the group's exchange, where ranks that do something else meanwhile all get its
// MismatchError.

// For each rank of the group the first of those that it shares statistics with. `layer` is the one
// that uses the scope, for errors. Throws what leaders_of() throws, on every rank.
[[nodiscard]] std::vector<int> agree_on_leaders(Exchange& group, const Scope& scope,
                                                std::string_view layer);

// The scope that norm_batch:M stands for where the largest of the ranks' batches is nominal; none
// where all are empty. `samples` is this rank's batch.
[[nodiscard]] std::optional<Scope> agree_on_norm_batch(Exchange& group, const Scope& scope,
                                                       std::string_view layer,
                                                       std::int64_t samples);

// How many samples each rank has in the step to come, in the order of the ranks. `own` is this
// rank's number; what negative ones mean is the caller's.
[[nodiscard]] std::vector<std::int64_t> gather_samples(Exchange& group, std::int64_t own);

// The exchange among the ranks that have this rank's leader; nullptr where this rank is alone.
[[nodiscard]] std::unique_ptr<Exchange> make_part_of(Exchange& group,
                                                     const std::vector<int>& leaders);

}  // namespace normscope
