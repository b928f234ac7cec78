// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/comm/worlds.h"

namespace normscope::testing {

// A group whose ranks are threads, each with a stream of its own, that adds messages in device
// memory by kernels that exchange data and wait for each other (kernels/peer_memory.h). It adds
// messages in host memory like run_as_threads().
//
// For tests: messages have at most kMostNumbers, and one device has all ranks.
// A failure gives NaN, and later calls throw it; a rank that has not come within the time limit is
// one, and so is a rank that leaves or calls fail().
inline constexpr std::int64_t kMostNumbers = 4096;
void run_as_threads_on_device(int ranks, const ExchangeOptions& options,
                              const CommunicatorBody& body);

}  // namespace normscope::testing
