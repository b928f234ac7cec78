// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/attributes.h"
#include "normscope/core/scope.h"

namespace normscope NORMSCOPE_EXPORT {

// How the ranks of a group find out together how a scope divides them. All functions are collective
// over the group's exchange, for ranks of all its parts. If some ranks do something else meanwhile,
// all ranks get MismatchError.

// For each rank of the group, the first of the ranks with which it shares statistics. Errors name
// `layer`, which uses the scope. Throws the errors of leaders_of(), on every rank.
[[nodiscard]] std::vector<int> agree_on_leaders(Exchange& group, const Scope& scope,
                                                std::string_view layer);

// Resolves norm_batch:M with the largest batch of any rank; nullopt if all batches are empty.
// `samples` is the size of this rank's batch.
[[nodiscard]] std::optional<Scope> agree_on_norm_batch(Exchange& group, const Scope& scope,
                                                       std::string_view layer,
                                                       std::int64_t samples);

// The exchange among the ranks that have this rank's leader; nullptr if this rank is alone.
[[nodiscard]] std::unique_ptr<Exchange> make_part_of(Exchange& group,
                                                     const std::vector<int>& leaders);

}  // namespace normscope
