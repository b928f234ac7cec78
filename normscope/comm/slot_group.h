// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "normscope/comm/calls.h"
#include "normscope/comm/exchange_options.h"
#include "normscope/comm/processes.h"
#include "normscope/comm/rank_names.h"
#include "normscope/comm/slot_memory.h"

namespace normscope {

// The ranks [first, last) of a SlotMemory.
struct RankRange {
  int first;
  int last;
};

// Where ranks show their calls.
struct ShownCalls {
  CallBoard board;
  std::vector<int> ranks;  // the numbers to show for the board's ranks
  bool are_all = true;     // if false, the board may lack calls that ranks have made
};

// One rank of a SlotMemory. Exchanges are counted in epochs: a rank writes its values to its slot,
// announces the number of the epoch, and waits until other ranks have announced the same number.
// The user of this class decides what the ranks then do with the slots.
//
// A rank has two slots and uses them in turn.
//
// A forked copy of this object is not one of the ranks: throw_if_forked() throws, and nothing that
// the copy does, including its destruction, affects the group.
class SlotGroup {
 public:
  // Joins the group in `memory` as `rank`. Throws ArgumentError if there is no such rank, or if it
  // has joined before. Errors begin with `transport`, which must outlive the object.
  SlotGroup(SlotMemory memory, int rank, std::string_view transport, RankNames names);
  SlotGroup(const SlotGroup&) = delete;
  SlotGroup& operator=(const SlotGroup&) = delete;
  ~SlotGroup();

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] RankRange all() const noexcept { return {.first = 0, .last = size_}; }
  [[nodiscard]] std::string_view transport() const noexcept { return transport_; }
  [[nodiscard]] const ExchangeOptions& options() const noexcept { return options_; }
  [[nodiscard]] const RankNames& names() const noexcept { return names_; }

  // Where the ranks show their calls: in their memory, unless another board has been set.
  [[nodiscard]] CallBoard& calls() noexcept { return calls_.board; }
  [[nodiscard]] const CallBoard& calls() const noexcept { return calls_.board; }
  [[nodiscard]] bool shows_all_calls() const noexcept { return calls_.are_all; }
  void show_calls_on(ShownCalls calls) { calls_ = std::move(calls); }

  // Whether this process joined as the rank; false in a fork of it.
  [[nodiscard]] bool is_at_home() const noexcept { return home_.is_this_one(); }

  // Throws CommunicationError.
  void throw_if_forked() const;
  void throw_if_failed() const;

  // Begins the next epoch, with a message of `length` numbers from this rank.
  void begin_epoch(std::size_t length) noexcept;

  // Of a rank in this epoch.
  [[nodiscard]] double* slot(int rank) const noexcept { return memory_.slot(rank, epoch_); }
  [[nodiscard]] std::int64_t& length(int rank) const noexcept {
    return memory_.member(rank).lengths[epoch_ % 2];
  }

  // Shows that this rank has arrived in the epoch, before it can announce it. Peers that wait for
  // it beyond the time limit then do not name it as missing.
  void show_arrival() noexcept { memory_.member(rank_).arrived = epoch_; }

  // Announces the epoch: this rank's slot and length are complete.
  void announce() noexcept;

  // Waits until those ranks have announced this epoch. Throws CommunicationError if one of them has
  // left or died, or if the group has failed; TimeoutError; and exceptions of a CallObserver. Each
  // exception marks the group as failed.
  void wait_for(RankRange awaited);

  // Marks the group as failed: "rank 1 of 4 failed: `reason`". The first failure wins.
  void fail(std::string_view reason) noexcept;

  // Marks the group as failed with exactly this text.
  void record_failure(std::string_view text) noexcept;

  // The same, and throws an `Error`. If there is an earlier failure, throws that instead.
  template <class Error>
  [[noreturn]] void end_with(const std::string& text);

  // Whether the ranks' lengths differ in this epoch. All ranks must have announced it.
  [[nodiscard]] bool lengths_differ() const noexcept;

  // Writes the sum of the first sum.size() numbers of this epoch's slots, added in rank order.
  void add_slots(std::span<double> sum) const noexcept;

  // Why the group has failed; empty if it has not.
  [[nodiscard]] std::string failure() const;

  // "shared memory: " + text.
  [[nodiscard]] std::string describe(std::string_view text) const;

  // "rank 1 of 4".
  [[nodiscard]] std::string name() const { return names_.name(rank_); }

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] SlotMemory::Member& member(int rank) const noexcept { return memory_.member(rank); }

  void sleep_until_come(int peer, std::chrono::milliseconds time_left);
  void tell_observer(Clock::time_point start);
  [[nodiscard]] bool has_come(int peer) const noexcept;
  [[nodiscard]] bool have_come(RankRange peers) const noexcept;
  [[nodiscard]] std::vector<int> missing() const;

  void throw_if_any_gone(RankRange awaited);
  [[nodiscard]] std::chrono::milliseconds time_left_or_throw(RankRange awaited,
                                                             Clock::time_point start);
  [[nodiscard]] std::string where_ranks_are() const;

  SlotMemory memory_;
  HomeProcess home_;
  int rank_;
  int size_;
  std::chrono::microseconds yield_time_;  // how long a waiting rank yields before it sleeps
  std::string_view transport_;
  RankNames names_;
  ExchangeOptions options_;
  std::uint32_t epoch_;
  ShownCalls calls_;
};

}  // namespace normscope
