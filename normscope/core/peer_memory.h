// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/attributes.h"
#include "normscope/core/header.h"
#include "normscope/core/limbs.h"

namespace normscope NORMSCOPE_EXPORT {

// Memory in which ranks whose devices can write to each other's memory exchange the sums of norm
// batches: an allocation of size() doubles on the device of each rank, of zeros before the first
// exchange.
//
// It has slots for the sums of all ranks, which each rank writes into the memory of all, and words
// by which ranks announce that they have written. Each channel is exchanged by itself, with the
// header of the message: the ranks' kernels may divide the channels differently.
struct PeerMemory {
  static constexpr int kMostRanks = 8;

  // The numbers of a channel: canonical limbs, then the header.
  static constexpr std::int64_t kHeader = kSums * kLimbs;
  static constexpr std::int64_t kNumbers = kHeader + kHeaderSize;

  // Exchanges use slots in turn. Two are enough: a rank that announces exchange e + 1 of a channel
  // has read all of exchange e.
  static constexpr int kSlots = 2;

  int rank = 0;
  int ranks = 0;                      // 0: there is no such memory
  std::int64_t capacity = 0;          // channels
  std::int64_t time_limit = 0;        // of a kernel's wait, in nanoseconds
  double* of_ranks[kMostRanks] = {};  // the allocation of each rank, as this rank's device sees it
  std::uint64_t* failure = nullptr;   // of this rank, in host memory that its device can write

  // Values of *failure: if it is not kNone, waits end, and sums are NaN. kEnded: for a reason that
  // is known elsewhere. Others are 1 + the rank that has not come within the limit.
  static constexpr std::uint64_t kNone = 0;
  static constexpr std::uint64_t kEnded = ~std::uint64_t{0};

  // Of an allocation: [kSlots, ranks] slots [kNumbers, capacity], and the words [ranks, capacity].
  [[nodiscard]] NORMSCOPE_INLINE constexpr std::int64_t slot_size() const noexcept {
    return kNumbers * capacity;
  }
  [[nodiscard]] NORMSCOPE_INLINE constexpr std::int64_t size() const noexcept {
    return kSlots * ranks * slot_size() + ranks * capacity;
  }
  [[nodiscard]] NORMSCOPE_INLINE std::uint64_t* words(int owner) const noexcept {
    return reinterpret_cast<std::uint64_t*>(of_ranks[owner] + kSlots * ranks * slot_size());
  }
};

}  // namespace normscope
