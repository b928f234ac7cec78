// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "normscope/comm/calls.h"
#include "normscope/comm/communicator.h"
#include "normscope/comm/exchange_options.h"
#include "normscope/comm/home_process.h"
#include "normscope/comm/slot_memory.h"

namespace normscope {

// Ranks that see the same memory, be they threads or processes. A rank copies its values to a slot
// of its own, announces them by a new epoch, waits until every rank has announced the same epoch,
// and adds all slots in the order of the ranks: all get the same bits. A rank has two slots and
// uses them in turn, so that one exchange needs one wait: who announces epoch e + 1 has read the
// slots of e.
//
// A copy that a fork makes of a communicator is none of the ranks: its exchanges throw a
// CommunicationError, and nothing that it does, its end included, reaches the group.
class SlotCommunicator : public Communicator {
 public:
  ~SlotCommunicator() override;

  [[nodiscard]] int rank() const noexcept final { return rank_; }
  [[nodiscard]] int size() const noexcept final { return size_; }
  [[nodiscard]] std::string_view transport() const noexcept final { return transport_; }
  [[nodiscard]] bool compares_lengths() const noexcept final { return true; }
  [[nodiscard]] CallBoard* calls() noexcept final { return &calls_; }

  void all_reduce_sum(std::span<double> values, Stream stream = {}) final;
  void fail(std::string_view reason) noexcept final;

 protected:
  // Joins the group in `memory` as `rank`. Throws ArgumentError where there is no such
  // rank, or where it has joined before. `transport` must live as long as the communicator.
  SlotCommunicator(SlotMemory memory, int rank, std::string_view transport);

  [[nodiscard]] const ExchangeOptions& options() const noexcept { return options_; }

  // "shared memory: " + text.
  [[nodiscard]] std::string describe(std::string_view text) const;

  // "rank 1 of 4".
  [[nodiscard]] std::string name_of(int rank) const;

  // From now on the ranks, `members` of `whole`, show their calls where all ranks of that do: one
  // of them may be busy in another part.
  void show_calls_as_part_of(const SlotCommunicator& whole, const std::vector<int>& members) {
    calls_ = whole.calls_.part(members);
  }

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] SlotMemory::Member& member(int rank) const noexcept { return memory_.member(rank); }
  // The slot of the current epoch.
  [[nodiscard]] double* slot(int rank) const noexcept { return memory_.slot(rank, epoch_); }

  void announce() noexcept;
  void wait_for_all();
  void sleep_until_come(int peer, std::chrono::milliseconds time_left);
  void tell_observer(Clock::time_point start);
  [[nodiscard]] bool has_come(int peer) const noexcept;
  [[nodiscard]] bool all_have_come() const noexcept;

  void throw_if_forked() const;
  void throw_if_failed() const;
  void throw_if_any_gone();
  [[nodiscard]] std::chrono::milliseconds time_left_or_throw(Clock::time_point start);
  [[nodiscard]] std::string where_ranks_are() const;
  void throw_if_lengths_differ() const;
  void add_slots(std::span<double> sum) const noexcept;

  template <class Error>
  [[noreturn]] void end_with(const std::string& text);

  SlotMemory memory_;
  HomeProcess home_;
  int rank_;
  int size_;
  std::chrono::microseconds yield_time_;  // of a rank that waits, before it sleeps
  std::string_view transport_;
  ExchangeOptions options_;
  std::uint32_t epoch_;
  CallBoard calls_;
};

}  // namespace normscope
