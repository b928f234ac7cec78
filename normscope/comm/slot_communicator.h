// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/comm/rank_names.h"
#include "normscope/comm/slot_group.h"

namespace normscope {

// Ranks that share memory: threads or processes. Each rank adds the slots of all ranks in rank
// order, so all get the same bits. An exchange needs one wait only: a rank that announces epoch
// e + 1 has read the slots of epoch e.
class SlotCommunicator : public Communicator {
 public:
  [[nodiscard]] int rank() const noexcept final { return group_.rank(); }
  [[nodiscard]] int size() const noexcept final { return group_.size(); }
  [[nodiscard]] std::string_view transport() const noexcept final { return group_.transport(); }
  [[nodiscard]] bool compares_lengths() const noexcept final { return true; }
  [[nodiscard]] CallBoard* calls() noexcept final { return &group_.calls(); }

  void all_reduce_sum(std::span<double> values, Stream stream = {}) final;
  void fail(std::string_view reason) noexcept final { group_.fail(reason); }

  // From now on the ranks show their calls on `board`. If not `shows_all`, it may lack some calls.
  void show_calls_on(CallBoard board, bool shows_all) {
    group_.show_calls_on({std::move(board), group_.names().numbers(), shows_all});
  }

 protected:
  // Arguments as for SlotGroup.
  SlotCommunicator(const SlotMemory& memory, int rank, std::string_view transport)
      : group_(memory, rank, transport, RankNames(memory.ranks())) {}

  [[nodiscard]] SlotGroup& group() noexcept { return group_; }
  [[nodiscard]] const SlotGroup& group() const noexcept { return group_; }

  // From now on the ranks, `members` of `whole`, show their calls on the board of `whole`: a rank
  // that is late here may be busy in another part.
  void show_calls_as_part_of(const SlotCommunicator& whole, const std::vector<int>& members) {
    show_calls_on(whole.group_.calls().part(members), whole.group_.shows_all_calls());
  }

 private:
  [[noreturn]] void throw_lengths_differ() const;

  SlotGroup group_;
};

}  // namespace normscope
