// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "normscope/comm/self_communicator.h"
#include "normscope/comm/thread_communicator.h"
#include "normscope/torch/groups/rank_group.h"
#include "tests/support/ranks.h"

namespace normscope::testing {

// Runs ranks as threads, each with its own group.
inline void run_ranks(int ranks, const std::function<void(const RankGroup& group)>& body) {
  std::vector<std::unique_ptr<Communicator>> communicators = make_thread_communicators(ranks);
  spawn_threads(ranks, [&](int rank) {
    body(RankGroup(std::move(communicators[static_cast<std::size_t>(rank)])));
  });
}

// A group of this rank alone.
inline RankGroup alone() { return RankGroup(make_self_communicator()); }

}  // namespace normscope::testing
