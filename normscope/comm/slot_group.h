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
#include "normscope/comm/home_process.h"
#include "normscope/comm/rank_names.h"
#include "normscope/comm/slot_memory.h"

namespace normscope {

// Some ranks of a SlotMemory: `first` and those after it, up to and without `last`.
struct RankRange {
  int first;
  int last;
};

// Where ranks show their calls.
struct ShownCalls {
  CallBoard board;
  std::vector<int> ranks;  // what the board's ranks are called
  bool are_all = true;     // else a rank without a call may have made one that is unknown here
};

// One rank of a SlotMemory. It counts exchanges by epochs: it puts its values into a slot of its
// own, announces them by the number of the epoch, and waits until other ranks have announced the
// same number. What the ranks then do with the slots is up to the user of this class.
//
// A rank has two slots and uses them in turn.
//
// A copy that a fork makes of a group is none of the ranks: throw_if_forked() throws, and nothing
// that it does, its end included, reaches the group.
class SlotGroup {
 public:
  // Joins the group in `memory` as `rank`. Throws ArgumentError if there is no such rank, or if it
  // has joined before. `transport`, with which errors begin, must outlive the object.
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

  // Where the ranks show their calls: in their memory, unless they have another board.
  [[nodiscard]] CallBoard& calls() noexcept { return calls_.board; }
  [[nodiscard]] const CallBoard& calls() const noexcept { return calls_.board; }
  [[nodiscard]] bool shows_all_calls() const noexcept { return calls_.are_all; }
  void show_calls_on(ShownCalls calls) { calls_ = std::move(calls); }

  // Whether this process is the rank, and not a fork of it.
  [[nodiscard]] bool is_at_home() const noexcept { return home_.is_this_one(); }

  // Throws CommunicationError.
  void throw_if_forked() const;
  void throw_if_failed() const;

  // The next epoch, in which this rank has a message of `length` numbers.
  void begin_epoch(std::size_t length) noexcept;

  // Of this epoch.
  [[nodiscard]] double* slot(int rank) const noexcept { return memory_.slot(rank, epoch_); }
  [[nodiscard]] std::int64_t& length(int rank) const noexcept {
    return memory_.member(rank).lengths[epoch_ % 2];
  }

  // Shows that this rank takes part in the epoch, before it announces anything: a rank that waits
  // for it beyond the time limit knows that others are to blame.
  void show_arrival() noexcept { memory_.member(rank_).arrived = epoch_; }

  // This rank's slot and length are complete.
  void announce() noexcept;

  // Until those ranks have announced this epoch. Throws CommunicationError if one of them has left
  // or died, or if the group has failed; TimeoutError; and what a CallObserver throws. The group
  // has failed after each.
  void wait_for(RankRange awaited);

  // The group fails: "rank 1 of 4 failed: `reason`". The first failure wins.
  void fail(std::string_view reason) noexcept;

  // The same, in these words.
  void record_failure(std::string_view text) noexcept;

  // The same, and throws an `Error`, or a CommunicationError with the reason that came first.
  template <class Error>
  [[noreturn]] void end_with(const std::string& text);

  // Whether the ranks have messages of different lengths in this epoch; all have announced it.
  [[nodiscard]] bool lengths_differ() const noexcept;

  // The sum of this epoch's slots, in the order of the ranks. [sum.size()] numbers of each.
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
  std::chrono::microseconds yield_time_;  // of a rank that waits, before it sleeps
  std::string_view transport_;
  RankNames names_;
  ExchangeOptions options_;
  std::uint32_t epoch_;
  ShownCalls calls_;
};

}  // namespace normscope
