// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/comm/worlds.h"

namespace normscope::testing {

// A group whose ranks are threads, each with a stream of its own, and whose kernels exchange sums
// in device memory and wait for each other (core/peer_memory.h). It adds messages in host memory
// like run_as_threads().
//
// For tests: there are at most kMostChannels, and one device has all ranks.
// A failure gives NaN, and later calls throw it; a rank that has not come within the time limit is
// one, and so is a rank that leaves or calls fail().
inline constexpr std::int64_t kMostChannels = 130;
void run_as_threads_on_device(int ranks, const ExchangeOptions& options,
                              const CommunicatorBody& body);

}  // namespace normscope::testing
