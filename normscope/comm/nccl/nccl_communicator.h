// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>

#include "normscope/comm/communicator.h"
#include "normscope/core/attributes.h"

struct ncclComm;  // declared by NCCL: ncclComm_t is a pointer to it

namespace normscope NORMSCOPE_EXPORT {

// The most channels of a communicator: each takes memory and processors of the device, and messages
// are too short for more.
inline constexpr int kMostNcclChannels = 4;

// A communicator over NCCL, of the ranks of `ranks`, with one GPU each. It uses a duplicate
// (ncclCommSplit): its messages never mix with the caller's. Collective.
//
// A sum in device memory is queued on the given stream, and nothing waits for it; a CUDA graph may
// capture it. It is aborted if it has not ended within the time limit, counted from the call, or if
// NCCL reports an error. The work that follows on the stream then runs with wrong values, and the
// next call throws. A sum in host memory is copied to the device and back, and its call waits.
//
// NCCL cannot notify peers of fail(): they throw at their time limit. Lengths must agree.
//
// Throws ArgumentError if `ranks` is null, CommunicationError if NCCL or CUDA reports an error, and
// TimeoutError if ranks are missing.
[[nodiscard]] std::unique_ptr<Communicator> make_nccl_communicator(
    ncclComm* ranks, std::chrono::milliseconds time_limit = std::chrono::minutes(10));

// The same for the ranks of `bootstrap`, each with the current device of its thread; no two ranks
// may use the same device. `bootstrap` only distributes NCCL's unique id and need not outlive the
// call.
[[nodiscard]] std::unique_ptr<Communicator> make_nccl_communicator(
    Communicator& bootstrap, std::chrono::milliseconds time_limit = std::chrono::minutes(10));

}  // namespace normscope
