// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "normscope/comm/calls.h"

namespace normscope::binding {

// What the ranks of a group tell each other next to their messages: in the group's store, which can
// be read without waiting for the rank that wrote. A store whose server has died or stands still is
// waited for a few seconds at most.
class GroupStore {
 public:
  // `rank` is this one's place in the group, `names` what errors call its ranks.
  GroupStore(c10::intrusive_ptr<c10d::Store> store, int rank, std::vector<int> names);

  // What errors call this rank.
  [[nodiscard]] int name() const { return names_[rank_]; }

  // For some of the ranks, given by their places in this group; `rank` is a place among them.
  [[nodiscard]] GroupStore part(const std::string& name, int rank,
                                const std::vector<int>& members) const;

  // Waits until every rank has called this for `what`, which is once each. Throws TimeoutError,
  // naming those that have not; CommunicationError with what a rank gave to fail().
  void meet(const std::string& what, std::chrono::milliseconds time_limit);

  // Tells ranks that ask later why there is nothing to wait for. The first text counts.
  void fail(const std::string& text) noexcept;

  // What a rank gave to fail().
  [[nodiscard]] std::optional<std::string> failure() noexcept;

  // What this rank does, for ranks that ask later.
  void show_call(const RankCall& call) noexcept;

  // What the others have shown, by their places in this group.
  [[nodiscard]] std::vector<std::pair<int, RankCall>> calls_of_others() noexcept;

  // Why a message to all ranks has failed, for which no rank gave a reason: who is not there any
  // more, or not yet. All that are there call this at about the same time.
  [[nodiscard]] std::string who_is_missing() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void tell_observer(const std::string& what, Clock::duration waited);
  [[nodiscard]] std::string key(const std::string& what, std::size_t rank) const;
  [[nodiscard]] std::vector<int> without(const std::string& what);

  c10::intrusive_ptr<c10d::Store> store_;
  std::size_t rank_;
  std::vector<int> names_;
};

}  // namespace normscope::binding
