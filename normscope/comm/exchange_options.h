// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

namespace normscope {

// Longer time limits act like this one: in practice there is none, and the sums of a clock would
// overflow.
inline constexpr std::chrono::milliseconds kLongestTimeLimit = std::chrono::hours(24 * 365 * 30);

// How ranks that share memory exchange messages. A property of the group: all its ranks, and all
// groups that are split from it, have the same options.
struct ExchangeOptions {
  // The longest wait for the other ranks. The default is torch's for a process group.
  std::chrono::milliseconds time_limit = std::chrono::minutes(10);

  // float64 numbers in a slot; longer messages are exchanged in pieces. 64 KiB: a sum and the slot
  // that is added to it stay in a core's second-level cache.
  std::int64_t slot_length = 8192;
};

}  // namespace normscope
