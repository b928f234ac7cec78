// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include "normscope/comm/communicator.h"
#include "normscope/core/export.h"

struct ncclComm;  // NCCL's: an ncclComm_t points to one

namespace normscope NORMSCOPE_EXPORT {

// The ranks of `ranks`, one GPU each, whose messages NCCL carries. They travel on a duplicate
// (ncclCommSplit), and never mix with the caller's own. Collective.
//
// Messages in a device's memory are summed on the stream that comes with them, and nothing waits
// for it; a CUDA graph may capture that. A sum that has not ended after the time limit, counted
// from the call, or that NCCL reports an error for, is aborted: what follows on the stream then
// runs with what is there, and the next call throws. Messages in the host's memory go by the device
// and wait.
//
// NCCL has no message for fail(): peers find out at their time limit. Lengths must agree.
//
// Throws ArgumentError where `ranks` is null, CommunicationError where NCCL or CUDA reports an
// error, TimeoutError where ranks do not come.
[[nodiscard]] std::unique_ptr<Communicator> make_nccl_communicator(
    ncclComm* ranks, std::chrono::milliseconds time_limit = std::chrono::minutes(10));

// The same for the ranks of `meeting`, each with the device that is current for its thread; no two
// ranks of a group may have the same one. NCCL's unique id travels over `meeting`, which is needed
// no longer then.
[[nodiscard]] std::unique_ptr<Communicator> make_nccl_communicator(
    Communicator& meeting, std::chrono::milliseconds time_limit = std::chrono::minutes(10));

}  // namespace normscope
