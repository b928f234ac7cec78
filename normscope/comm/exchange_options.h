// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

namespace normscope {

// How ranks that share memory exchange messages. A property of the group: all its ranks, and the
// groups split from it, have the same.
struct ExchangeOptions {
  // The longest wait for the other ranks, as torch's default for a process group.
  std::chrono::milliseconds time_limit = std::chrono::minutes(10);

  // float64 numbers that a rank can show the others at once; longer messages go in pieces. 64 KiB:
  // two of them, a sum and a slot that is added to it, stay in a core's second-level cache.
  std::int64_t slot_length = 8192;
};

}  // namespace normscope
