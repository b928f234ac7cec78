// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "normscope/comm/calls.h"

namespace normscope::binding {

// Facts that the ranks of a group tell each other besides their messages. They are kept in the
// group's store, which can be read without waiting for the rank that wrote. If the store's server
// has died or hangs, one call waits a few seconds, and the calls of the next minute do not ask it.
class GroupStore {
 public:
  // `rank` is this rank's place in the group. `names` [ranks] are the ranks' numbers in errors.
  GroupStore(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> names);

  // This rank's number in errors.
  [[nodiscard]] int name() const { return names_[rank_]; }

  // A store for some of the ranks, given by their places in this group.
  [[nodiscard]] GroupStore part(const std::string& name, const std::vector<int>& members) const;

  // Waits until every rank has called this once with the same `what`. Throws TimeoutError, which
  // names the missing ranks, or CommunicationError with the text that a rank passed to fail().
  void meet(const std::string& what, std::chrono::milliseconds time_limit);

  // Tells ranks that ask later why they need not wait. Only the first text is kept.
  void fail(const std::string& text) noexcept;

  // The text that a rank passed to fail(), if any.
  [[nodiscard]] std::optional<std::string> failure() noexcept;

  // Shows what this rank is doing to ranks that ask later.
  void show_call(const RankCall& call) noexcept;

  // The calls that the other ranks have shown, by their places in this group.
  [[nodiscard]] std::vector<std::pair<int, RankCall>> calls_of_others() noexcept;

  // Names the ranks that are missing after a message to all ranks has failed without a reason. All
  // ranks that are present must call this at about the same time.
  [[nodiscard]] std::string who_is_missing() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  // When to ask the server again, as a count of the clock. Parts of a group have the same server.
  using AskAgain = std::atomic<Clock::rep>;

  template <class Ask>
  auto answer_of(std::chrono::milliseconds patience, Ask ask) const noexcept
      -> std::optional<decltype(ask())>;

  void tell_observer(const std::string& what, Clock::duration waited);
  [[nodiscard]] std::string key(const std::string& what, std::size_t rank) const;
  [[nodiscard]] std::vector<int> without(const std::string& what);

  c10::intrusive_ptr<c10d::Store> store_;
  std::size_t rank_;
  std::vector<int> names_;
  std::shared_ptr<AskAgain> ask_again_ = std::make_shared<AskAgain>(0);
};

}  // namespace normscope::binding
