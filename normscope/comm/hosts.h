// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// How the ranks of a group lie on hosts, as one of them sees it.
struct Hosts {
  std::vector<int> members;  // ranks of this rank's host, in ascending order
  std::vector<int> leaders;  // the first rank of each host, in ascending order

  // The memory that the members share. None if no host has two ranks, if ranks of one host cannot
  // reach each other's memory, or if one rank has the environment variable
  // NORMSCOPE_SHARED_MEMORY=0: then every rank of every host has none.
  std::optional<SharedMemorySegment> memory;

  [[nodiscard]] bool is_one() const noexcept { return leaders.size() == 1; }
};

// Collective over `group`: every rank makes the same sums there whatever it finds, so that no
// disagreement leaves a peer waiting. What a host is, host_identity() says; containers of one
// machine that do not see each other's processes are hosts of their own. Throws what the sums
// throw. `time_limit`: of waits in the memory.
[[nodiscard]] Hosts find_hosts(Communicator& group, std::chrono::milliseconds time_limit);

// A communicator of the same ranks that uses the memory of each host. If there is one host, all
// messages go by its memory. If there are several, ranks of a host add there, the leaders of the
// hosts add the hosts' sums over `group`, and the result goes back through the memory. It is
// `group` itself if `hosts` has no memory.
//
// Collective. Throws CommunicationError.
[[nodiscard]] std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group,
                                                       const Hosts& hosts);

// The same of the hosts that find_hosts() finds.
[[nodiscard]] std::unique_ptr<Communicator> over_hosts(std::unique_ptr<Communicator> group,
                                                       std::chrono::milliseconds time_limit);

}  // namespace normscope
