// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "normscope/comm/calls.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// The state of a group, as seen from outside.
struct GroupStatus {
  std::vector<RankCall> calls;          // by rank
  std::vector<std::int32_t> processes;  // by rank; 0: not joined, or on another host; -1: has left
  std::vector<int> dead;                // ranks whose processes are known to have ended
  std::string failure;                  // why the group has failed; empty: it has not
};

// The status of each group that a process of this host belongs to, one line per group, and a line
// per file that has the name of a group's memory and is skipped, because it is something else;
// empty if there is none. Works even if the process hangs. Throws CommunicationError if the process
// does not exist or may not be inspected.
[[nodiscard]] std::string status_of_process(std::int64_t process);

// What is known to have happened to another rank in such a group: why it has failed, or that it has
// died. Empty if nothing is known.
[[nodiscard]] std::string fault_of_peers(std::int64_t process);

}  // namespace normscope
