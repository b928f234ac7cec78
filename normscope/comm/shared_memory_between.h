// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include "normscope/comm/communicator.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// A group of the same ranks as `group` over shared memory, where all of them can reach it; else
// nullptr, on every rank. Ranks of other hosts cannot, nor can processes that may not look into
// rank 0's; and the environment variable NORMSCOPE_SHARED_MEMORY=0 of one rank decides for all.
//
// Collective over `group`: every rank makes the same two sums there whatever it finds, so that no
// disagreement can leave a peer waiting. Throws what those throw.
[[nodiscard]] std::unique_ptr<Communicator> shared_memory_between(
    Communicator& group, std::chrono::milliseconds time_limit);

}  // namespace normscope
