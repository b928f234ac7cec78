// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/stream.h"

namespace normscope::testing {

// What the ranks of a group share on their device. The host can access it too.
struct SharedSlots {
  // A rank uses its slots in turn. Two are enough: a rank that announces epoch e + 1 has read the
  // slots of epoch e.
  static constexpr int kSlots = 2;

  int ranks = 0;
  std::int64_t capacity = 0;           // numbers that fit into a slot, after their count
  std::int64_t time_limit = 0;         // nanoseconds
  double* slots = nullptr;             // [kSlots, ranks, 1 + capacity]
  std::uint64_t* announced = nullptr;  // [ranks] the last epoch whose slot is complete
  std::uint64_t* failure = nullptr;    // 0: none
};

// Values of SharedSlots::failure. Others are 1 + the rank that did not come.
inline constexpr std::uint64_t kToldByHost = ~std::uint64_t{0};

// Queues a kernel that replaces `values` by their sum over the ranks. The sum is NaN if the ranks
// have different sizes, or if a failure keeps any of them from coming. At most one kernel of a rank
// may run at a time.
void queue_sum_over_ranks(Stream stream, const SharedSlots& shared, int rank, double* values,
                          std::int64_t size);

}  // namespace normscope::testing
