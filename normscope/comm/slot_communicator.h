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

#include "normscope/comm/communicator.h"
#include "normscope/comm/describe.h"
#include "normscope/comm/processes.h"
#include "normscope/comm/slot_memory.h"

namespace normscope {

// One rank of a group that shares memory: threads, or processes of one host. Exchanges are counted
// in epochs: a rank writes its values to its slot, announces the number of the epoch, and waits
// until other ranks have announced the same number. A rank has two slots and uses them in turn.
//
// Here each rank adds the slots of all ranks in their order, so all get the same bits. An exchange
// needs one wait only: a rank that announces epoch e + 1 has read the slots of epoch e.
//
// The memory may be that of only some ranks of the group. A rank's place is its number in the
// memory.
//
// A forked copy of this object is not one of the ranks: its sums throw, and nothing that the copy
// does, including its destruction, affects the group.
class SlotCommunicator : public Communicator {
 public:
  ~SlotCommunicator() override { leave(); }

  [[nodiscard]] int rank() const noexcept final { return number(place_); }
  [[nodiscard]] int size() const noexcept final { return size_; }
  [[nodiscard]] std::string_view transport() const noexcept final { return transport_; }
  [[nodiscard]] bool compares_lengths() const noexcept override { return true; }
  [[nodiscard]] CallBoard* calls() noexcept final { return &board_; }

  void all_reduce_sum(std::span<double> values, Stream stream = {}) override;
  void fail(std::string_view reason) noexcept override;

  // From now on the ranks show their calls on `board`: that of the memory, or of the whole group.
  // If not `shows_all`, it may lack calls that ranks have made.
  void show_calls_on(CallBoard board, bool shows_all) {
    board_ = std::move(board);
    shows_all_ = shows_all;
  }

 protected:
  // The ranks at the places [first, last).
  struct Places {
    int first;
    int last;
  };

  // Joins the group in `memory` at `place`, whose ranks are `numbers` of a group of `size`. Throws
  // ArgumentError if there is no such place, or if a rank has joined there before. Errors begin
  // with `transport`.
  SlotCommunicator(SlotMemory memory, int place, std::string transport, std::vector<int> numbers,
                   int size);

  // The same for all ranks of a group.
  SlotCommunicator(const SlotMemory& memory, int rank, std::string transport)
      : SlotCommunicator(memory, rank, std::move(transport), numbers_of_ranks(memory.ranks()),
                         memory.ranks()) {}

  // Leaves the group: peers that still wait for this rank throw.
  void leave() noexcept;

  [[nodiscard]] int place() const noexcept { return place_; }
  [[nodiscard]] Places all() const noexcept { return {.first = 0, .last = memory_.ranks()}; }
  [[nodiscard]] ExchangeOptions options() const noexcept { return memory_.options(); }

  // From now on the ranks, `members` of `whole`, show their calls on the board of `whole`: a rank
  // that is late here may be busy in another part.
  void show_calls_as_part_of(const SlotCommunicator& whole, const std::vector<int>& members) {
    show_calls_on(whole.board_.part(members), whole.shows_all_);
  }

  // Whether this process joined as the rank; false in a fork of it.
  [[nodiscard]] bool is_at_home() const noexcept { return home_.is_this_one(); }

  // Throws CommunicationError in a fork, and if the group has failed.
  void throw_if_unusable() const;

  // Sums in pieces that fit a slot. Returns false if the ranks' lengths differ.
  [[nodiscard]] bool sum(std::span<double> values);

  // Sums one piece of a message of `length` numbers. It has been written to this rank's slot, but
  // not announced. Returns false if the ranks' lengths differ.
  [[nodiscard]] virtual bool sum_piece(std::span<double> piece, std::size_t length);

  // The lengths that the ranks passed, after sum() has returned false.
  [[nodiscard]] virtual std::vector<double> different_lengths(std::size_t own);

  // Of a rank in this epoch.
  [[nodiscard]] double* slot(int place) const noexcept { return memory_.slot(place, epoch_); }
  [[nodiscard]] std::int64_t& length(int place) const noexcept {
    return member(place).lengths[epoch_ % 2];
  }

  // Shows that this rank has arrived in the epoch, before it can announce it. Peers that wait for
  // it beyond the time limit then do not name it as missing.
  void show_arrival() noexcept { member(place_).arrived = epoch_; }

  // Announces the epoch: this rank's slot and length are complete.
  void announce() noexcept;

  // Waits until those ranks have announced this epoch. Throws CommunicationError if one of them has
  // left or died, or if the group has failed; TimeoutError; and exceptions of a CallObserver. Each
  // exception marks the group as failed.
  void wait_for(Places awaited);

  // Whether the ranks' lengths differ in this epoch. All ranks must have announced it.
  [[nodiscard]] bool lengths_differ() const noexcept;

  // Writes the sum of the first sum.size() numbers of this epoch's slots, added in their order.
  void add_slots(std::span<double> sum) const noexcept;

  // Marks the group as failed with exactly this text. The first failure wins.
  void record_failure(std::string_view text) noexcept;

  // The same, and throws an `Error`. If there is an earlier failure, throws that instead.
  template <class Error>
  [[noreturn]] void end_with(const std::string& text);

  // Why the group has failed; empty if it has not.
  [[nodiscard]] std::string failure() const;

  // "shared memory: " + text.
  [[nodiscard]] std::string describe(std::string_view text) const;

  // "rank 1 of 4".
  [[nodiscard]] std::string name_of(int place) const { return name_of_rank(number(place), size_); }
  [[nodiscard]] std::string name() const { return name_of(place_); }

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] SlotMemory::Member& member(int place) const noexcept {
    return memory_.member(place);
  }
  [[nodiscard]] int number(int place) const noexcept {
    return numbers_[static_cast<std::size_t>(place)];
  }
  // "ranks 0, 2".
  [[nodiscard]] std::string list(std::vector<int> places) const;

  void throw_if_failed() const;
  void sleep_until_come(int peer, std::chrono::milliseconds time_left);
  [[nodiscard]] bool has_come(int peer) const noexcept;
  [[nodiscard]] bool have_come(Places peers) const noexcept;
  [[nodiscard]] std::vector<int> missing() const;

  void throw_if_any_gone(Places awaited);
  [[nodiscard]] std::chrono::milliseconds time_left_or_throw(Places awaited,
                                                             Clock::time_point start);
  [[nodiscard]] std::string where_ranks_are() const;

  SlotMemory memory_;
  HomeProcess home_;
  int place_;
  std::string transport_;
  std::vector<int> numbers_;  // of the ranks in the group, by place
  int size_;
  std::chrono::microseconds yield_time_;  // how long a waiting rank yields before it sleeps
  std::uint32_t epoch_ = SlotMemory::kFirstEpoch;
  CallBoard board_;
  bool shows_all_ = true;
};

}  // namespace normscope
