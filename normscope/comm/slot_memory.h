// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "normscope/comm/exchange_options.h"
#include "normscope/comm/group_status.h"
#include "normscope/core/cache_line.h"

namespace normscope {

// The memory that the ranks of a SlotGroup share: the group, a board of calls (calls.h), a
// member and two slots of values for each rank.
//
// All atomics are sequentially consistent. Announcing and falling asleep rely on it: either the
// sleeper sees the new epoch, or the announcer sees the sleeper.
class SlotMemory {
 public:
  // Epochs wrap around after 2^32 exchanges. They begin shortly before, so that every long run
  // crosses the wrap-around and no defect there can hide.
  static constexpr std::uint32_t kFirstEpoch = 0U - 256U;

  // Member::process, where it is not a process id.
  static constexpr std::int32_t kNotJoined = 0;
  static constexpr std::int32_t kLeft = -1;

  struct Member {
    alignas(kCacheLine) std::atomic<std::uint32_t> epoch = kFirstEpoch;
    std::atomic<std::uint32_t> bell = 0;      // what those who wait for this rank sleep on
    std::atomic<std::uint32_t> sleepers = 0;  // how many they are
    std::atomic<std::int32_t> process = kNotJoined;
    std::atomic<std::uint64_t> pid_namespace = 0;      // whose number that is; 0 until it is known
    std::atomic<std::uint32_t> arrived = kFirstEpoch;  // that it has begun, if it shows that
    std::int64_t lengths[2] = {};  // of the whole message, by the epoch's parity
  };

  // Bytes of the memory of a group. Throws ArgumentError.
  [[nodiscard]] static std::int64_t bytes(int ranks, const ExchangeOptions& options);

  // Makes a group in `memory` [bytes(ranks, options)], aligned to 64 bytes, before any rank joins.
  static void initialize(void* memory, int ranks, const ExchangeOptions& options);

  // An initialized group.
  explicit SlotMemory(std::shared_ptr<void> memory);

  // What can be seen of the group without joining it.
  [[nodiscard]] GroupStatus look_at() const;

  [[nodiscard]] int ranks() const noexcept;
  [[nodiscard]] ExchangeOptions options() const noexcept;
  [[nodiscard]] std::shared_ptr<void> board() const noexcept;
  [[nodiscard]] Member& member(int rank) const noexcept { return members_[rank]; }
  [[nodiscard]] double* slot(int rank, std::uint32_t epoch) const noexcept {
    const std::size_t index = 2 * static_cast<std::size_t>(rank) + epoch % 2;
    return reinterpret_cast<double*>(slots_ + index * slot_bytes_);
  }

  // Whether the group has failed, and why.
  [[nodiscard]] bool has_failed() const noexcept;
  [[nodiscard]] const char* failure() const noexcept;

  // Whether this failure is the first of the group, which wins. Wakes all that sleep.
  bool record_failure(std::string_view reason) const noexcept;

  // Those that wait for this rank.
  void wake_sleepers(int rank) const noexcept;

 private:
  struct Group;
  [[nodiscard]] Group& group() const noexcept;

  std::shared_ptr<void> memory_;
  Member* members_;
  std::byte* slots_;
  std::size_t slot_bytes_;
};

}  // namespace normscope
