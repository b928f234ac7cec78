// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// How the ranks of a group are distributed over hosts, from the view of one rank.
struct Hosts {
  std::vector<int> members;  // the ranks on this rank's host, in ascending order
  std::vector<int> leaders;  // the first rank of each host, in ascending order

  // The memory that the members share. Empty on every rank of every host if no host has two ranks,
  // if ranks of one host cannot access each other's memory, or if one rank has the environment
  // variable NORMSCOPE_SHARED_MEMORY=0.
  std::optional<SharedMemorySegment> memory;

  [[nodiscard]] bool is_one() const noexcept { return leaders.size() == 1; }
};

// Collective over `group`. Every rank makes the same sums, whatever it finds, so no peer is left
// waiting. Ranks are on one host if their identity_of_process_ids() is equal: two containers on one
// machine may be two hosts. Throws the errors of the sums. `time_limit` is for waits in the shared
// memory.
[[nodiscard]] Hosts find_hosts(Communicator& group, std::chrono::milliseconds time_limit);

// A communicator of the same ranks that uses the shared memory of each host. With one host, all
// messages go through its memory. With several, the ranks of each host add in its memory, the
// leaders add the hosts' sums over `group`, and the result goes back through the memory. Returns
// `group` itself if `hosts` has no memory.
//
// Collective. Throws CommunicationError, and ArgumentError without a group.
[[nodiscard]] std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group,
                                                       const Hosts& hosts);

// The same with the hosts that find_hosts() finds.
[[nodiscard]] std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group,
                                                       std::chrono::milliseconds time_limit);

}  // namespace normscope

namespace normscope {

// The ranks of `whole`, on several `hosts` with shared memory. The ranks of each host add in its
// memory, and the leaders of the hosts add over a part of `whole`. Collective. Throws
// CommunicationError.
[[nodiscard]] std::unique_ptr<Communicator> make_two_level_communicator(
    std::unique_ptr<Communicator> whole, const Hosts& hosts);

}  // namespace normscope
