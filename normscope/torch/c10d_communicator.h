// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/comm/communicator.h"
#include "normscope/comm/sub_group.h"

namespace normscope::binding {

// The ranks of a process group of torch.distributed, whatever its backend. Does not keep the group
// alive. The group's own time limit holds unless another is given.
//
// Some backends end the process where ranks come with different lengths (Gloo does). A message
// therefore begins with a frame that is as long for every message and carries the length; what does
// not fit into it follows once the lengths are known to agree.
class C10dCommunicator final : public Communicator {
 public:
  explicit C10dCommunicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            std::optional<std::chrono::milliseconds> time_limit = std::nullopt);

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] std::string_view transport() const noexcept override { return transport_; }
  [[nodiscard]] bool compares_lengths() const noexcept override { return true; }

  void all_reduce_sum(std::span<double> values, Stream stream = {}) override;

  // By the group's backend, where that can split. Parts are no groups of torch.distributed.
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override;

  // torch.distributed has no message for this: peers find out at their time limit.
  void fail(std::string_view reason) noexcept override;

 private:
  // Of a part, which it keeps alive.
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> part,
                   const c10d::AllreduceOptions& options);

  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> group_or_throw() const;
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> part_of(c10d::ProcessGroup& group,
                                                               const SubGroup& members) const;
  void all_reduce(std::span<double> values);
  [[noreturn]] void throw_lengths_differ(std::size_t length);
  [[nodiscard]] std::string describe(std::string_view text) const;

  c10::intrusive_ptr<c10d::ProcessGroup> part_;  // none: somebody else's group
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  int parts_ = 0;  // made so far
  int rank_;
  int size_;
  std::string transport_;
  c10d::AllreduceOptions options_;
  std::string failure_;  // the first one; empty: none
};

}  // namespace normscope::binding
