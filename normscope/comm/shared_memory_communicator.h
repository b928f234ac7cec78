// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// Joins the group of `segment` as `rank`. The ranks are processes of one host, or threads in them;
// the segment need not outlive the call. If a rank's communicator is destroyed or its process dies,
// peers that wait for it throw a CommunicationError that says so.
//
// The ranks show their calls on `board` if it is given, else in the segment.
//
// Not collective: the first exchange waits for ranks that have not joined. Throws ArgumentError if
// the group has no such rank, or if the rank has joined before.
[[nodiscard]] std::unique_ptr<Communicator> make_shared_memory_communicator(
    const SharedMemorySegment& segment, int rank, const CallBoard* board = nullptr);

}  // namespace normscope

namespace normscope {

// The memory of a part of a group, on one rank of the part.
struct MemoryOfPart {
  std::optional<SharedMemorySegment> segment;
  std::string error;         // why this rank could not create or open it; empty: it could
  std::vector<int> without;  // the ranks of the whole group that could not
};

// The first of `members`, which are this rank's part of `whole`, creates the memory of the part;
// the others open it. Collective over `whole`: every rank makes the same sums, whatever fails, so
// no peer is left waiting. Throws the errors of the sums.
[[nodiscard]] MemoryOfPart make_memory_of_part(Communicator& whole, const std::vector<int>& members,
                                               const ExchangeOptions& options);

}  // namespace normscope
