// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "normscope/comm/calls.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// What another process can see of a group.
struct GroupStatus {
  std::vector<RankCall> calls;          // by rank
  std::vector<std::int32_t> processes;  // by rank; 0: not joined, or of another host; -1: has left
  std::string failure;                  // why the group can exchange no more; empty: it can
};

// The groups that a process of this host takes part in, as text: a paragraph each, empty if it has
// none. The process need not answer: it may hang. Throws CommunicationError if there is no such
// process, or this one may not look into it.
[[nodiscard]] std::string status_of_process(std::int64_t process);

}  // namespace normscope
