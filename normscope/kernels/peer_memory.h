// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "normscope/core/attributes.h"
#include "normscope/core/stream.h"

namespace normscope NORMSCOPE_EXPORT {

// Memory in which ranks whose devices can write to each other's memory exchange messages: an
// allocation of size() doubles on the device of each rank, of zeros before the first message.
//
// It has slots for the messages of all ranks, which each rank writes into the memory of all, and
// words by which ranks announce that they have written. A message is written and announced in
// parts, one by each block of the kernel.
struct PeerMemory {
  static constexpr int kMostRanks = 8;
  static constexpr int kParts = 8;

  // Messages use slots in turn. Two are enough: a rank that announces message e + 1 has read all of
  // message e.
  static constexpr int kSlots = 2;

  int rank = 0;
  int ranks = 1;
  std::int64_t capacity = 0;          // numbers of the longest message
  std::int64_t time_limit = 0;        // of a kernel's wait, in nanoseconds
  double* of_ranks[kMostRanks] = {};  // the allocation of each rank, as this rank's device sees it
  std::uint64_t* failure = nullptr;   // of this rank, in host memory that its device can write

  // Values of *failure. Others are 1 + the rank that has not come within the limit.
  static constexpr std::uint64_t kNone = 0;
  static constexpr std::uint64_t kByHost = ~std::uint64_t{0};

  // Of an allocation: [kSlots, ranks] slots, and the words [ranks, kParts]. A slot has the size of
  // the message for each part, by which ranks find that theirs differ, and the numbers.
  [[nodiscard]] NORMSCOPE_INLINE constexpr std::int64_t slot_size() const noexcept {
    return kParts + capacity;
  }
  [[nodiscard]] NORMSCOPE_INLINE constexpr std::int64_t size() const noexcept {
    return kSlots * ranks * slot_size() + ranks * kParts;
  }
  [[nodiscard]] NORMSCOPE_INLINE std::uint64_t* words(int owner) const noexcept {
    return reinterpret_cast<std::uint64_t*>(of_ranks[owner] + kSlots * ranks * slot_size());
  }
};

// By which another process of the host finds an allocation.
using PeerHandle = std::array<std::byte, 64>;

// What a device offers to ranks that exchange messages in PeerMemory. All memory is zero, and never
// freed: a peer may still use it. Functions throw DeviceError.
struct PeerFunctions {
  // Allocates [size] on the current device, and the handle for other processes.
  double* (*allocate)(std::int64_t size, PeerHandle& handle);

  // The allocation of another process, as the current device sees it.
  double* (*open)(const PeerHandle& handle);

  // Allocates a word in host memory that devices can write.
  std::uint64_t* (*allocate_word)();

  // Work that is queued on `later` from now on waits for that on `earlier`.
  void (*order)(Stream earlier, Stream later);

  // Queues a kernel that replaces `values` in device memory by their sum over the ranks: infinity
  // if the ranks have different sizes, NaN if a failure keeps one from coming. Kernels of one rank
  // must run one after the other.
  void (*sum)(Stream stream, const PeerMemory& memory, double* values, std::int64_t size);
};

}  // namespace normscope
