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
#include "normscope/core/cache_lines.h"

namespace normscope {

// The memory that the ranks of a SlotCommunicator share: the group, a board of calls (calls.h), and
// for each rank a member and two slots of values.
//
// All atomics are sequentially consistent. Announcing and falling asleep rely on this: either the
// sleeper sees the new epoch, or the announcer sees the sleeper.
class SlotMemory {
 public:
  // Epochs wrap around after 2^32 exchanges. They start shortly before that point: every long run
  // crosses it, and no bug there can stay unnoticed.
  static constexpr std::uint32_t kFirstEpoch = 0U - 256U;

  // Values of Member::process that are not process ids.
  static constexpr std::int32_t kNotJoined = 0;
  static constexpr std::int32_t kLeft = -1;

  struct Member {
    alignas(kCacheLine) std::atomic<std::uint32_t> epoch = kFirstEpoch;
    std::atomic<std::uint32_t> bell = 0;      // the futex on which peers wait for this rank
    std::atomic<std::uint32_t> sleepers = 0;  // how many peers sleep on it
    std::atomic<std::int32_t> process = kNotJoined;
    std::atomic<std::uint64_t> pid_namespace = 0;      // of `process`; 0 until it is known
    std::atomic<std::uint32_t> arrived = kFirstEpoch;  // the last epoch of show_arrival()
    std::int64_t lengths[2] = {};  // of the whole message, by the epoch's parity
  };

  // Size of a group's memory in bytes. Throws ArgumentError.
  [[nodiscard]] static std::int64_t bytes(int ranks, const ExchangeOptions& options);

  // Creates a group in `memory` [bytes(ranks, options)], aligned to 64 bytes. No rank has joined.
  static void initialize(void* memory, int ranks, const ExchangeOptions& options);

  // `memory` [bytes] must hold an initialized group. Throws CommunicationError if its size differs
  // from what the group needs: another process may have written anything.
  SlotMemory(std::shared_ptr<void> memory, std::int64_t bytes);

  // The state of the group. The caller need not have joined it.
  [[nodiscard]] GroupStatus look_at() const;

  [[nodiscard]] int ranks() const noexcept { return ranks_; }
  [[nodiscard]] ExchangeOptions options() const noexcept { return options_; }
  [[nodiscard]] std::shared_ptr<void> board() const noexcept;
  [[nodiscard]] Member& member(int rank) const noexcept { return members_[rank]; }
  [[nodiscard]] double* slot(int rank, std::uint32_t epoch) const noexcept {
    const std::size_t index = 2 * static_cast<std::size_t>(rank) + epoch % 2;
    return reinterpret_cast<double*>(slots_ + index * slot_bytes_);
  }

  // Whether the group has failed, and why.
  [[nodiscard]] bool has_failed() const noexcept;
  [[nodiscard]] std::string failure() const;

  // Marks the group as failed and wakes all sleepers. Returns false, and changes nothing, if the
  // group has failed before.
  bool record_failure(std::string_view reason) const noexcept;

  // Sleeps while this rank's bell is `bell`, for at most `limit`; may return early.
  void sleep(int rank, std::uint32_t bell, std::chrono::milliseconds limit) const noexcept;

  // Rings this rank's bell: wakes the peers that wait for it.
  void wake_sleepers(int rank) const noexcept;

 private:
  struct Group;
  [[nodiscard]] Group& group() const noexcept;

  std::shared_ptr<void> memory_;
  // Copies: other processes may change those in the memory.
  int ranks_ = 0;
  ExchangeOptions options_;
  Member* members_ = nullptr;
  std::byte* slots_ = nullptr;
  std::size_t slot_bytes_ = 0;
};

}  // namespace normscope
