// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "normscope/comm/communicator.h"
#include "normscope/comm/shared_memory_segment.h"
#include "normscope/core/export.h"

namespace normscope NORMSCOPE_EXPORT {

// Joins the group of `segment` as `rank`. The ranks are processes of one host, or threads of some;
// the segment need not outlive the call. Peers that wait for a rank whose communicator was
// destroyed, or whose process has died, throw a CommunicationError that says so.
//
// The ranks show their calls on `board` if there is one, else in the segment.
//
// Not collective: ranks that have not joined are waited for in the first exchange. Throws
// ArgumentError where the group has no such rank, or where it has joined before.
[[nodiscard]] std::unique_ptr<Communicator> make_shared_memory_communicator(
    const SharedMemorySegment& segment, int rank, const CallBoard* board = nullptr);

}  // namespace normscope
