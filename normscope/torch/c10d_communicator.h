// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/comm/communicator.h"
#include "normscope/comm/sub_group.h"
#include "normscope/torch/call_publisher.h"
#include "normscope/torch/device.h"
#include "normscope/torch/own_group.h"

namespace normscope::binding {

// Whether a process group has a backend for tensors on such a device.
[[nodiscard]] bool serves(const c10d::ProcessGroup& group, c10::DeviceType device);

// The ranks of a process group of torch.distributed, whatever its backend. Does not keep the group
// alive. The group's own time limit holds unless another is given.
//
// Messages of the host go by a group of their own if there is one (own_group.h). Else the group
// must carry nothing but this communicator's messages.
//
// Some backends end the process where ranks come with different lengths (Gloo does), or never end
// (NCCL). A message of the host therefore begins with a frame that is as long for every message and
// carries the length; what does not fit into it follows once the lengths are known to agree. Where
// the group serves devices only, it goes by one of them.
//
// NCCL sums a message in a device's memory as it is, and nothing waits for it. Other backends would
// bring it to the host themselves; here it goes as the host's messages do.
class C10dCommunicator final : public Communicator {
 public:
  explicit C10dCommunicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            const Placement& placement = {},
                            std::optional<std::chrono::milliseconds> time_limit = std::nullopt,
                            std::unique_ptr<OwnGroup> own = nullptr);
  ~C10dCommunicator() override;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] std::string_view transport() const noexcept override { return transport_; }
  [[nodiscard]] bool compares_lengths() const noexcept override { return !sums_on_device_; }
  [[nodiscard]] CallBoard* calls() noexcept override { return board_ ? &*board_ : nullptr; }

  // From now on this rank's calls can be seen: from outside the process, and by the peers, if there
  // is an own group, once a call is `publish_after` old. Parts that are made later take part.
  void show_calls(std::chrono::milliseconds publish_after);

  void all_reduce_sum(std::span<double> values, Stream stream = {}) override;

  // By the group's backend, where that can split. Parts are no groups of torch.distributed, which
  // does not know of them: a part ends with its communicator. Where its group has been destroyed by
  // then, in good order; else aborted, as torch aborts a group that nobody destroyed.
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override;

  // A group of its own is closed, so that peers throw at once. torch.distributed has no message for
  // this: without one they find out at their time limit.
  void fail(std::string_view reason) noexcept override;

 private:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // A part of `whole`: of its group, if messages go by that, and then keeps it alive; and of its
  // own one.
  C10dCommunicator(Group part, std::unique_ptr<OwnGroup> own, const SubGroup& members,
                   const C10dCommunicator& whole);

  [[nodiscard]] Group group_for(const at::Tensor& sum) const;
  [[nodiscard]] Group part_of(c10d::ProcessGroup& group, const SubGroup& members) const;
  [[nodiscard]] c10::intrusive_ptr<c10d::Backend> split_backend(
      c10d::Backend& backend, const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& members) const;
  void stay_out_of_parts(c10d::ProcessGroup& group) const;
  void connect_devices();
  void end_part();
  void all_reduce_in_frame(std::span<double> values);
  void all_reduce(std::span<double> values);
  void all_reduce(const at::Tensor& sum);
  void wait_for(c10d::Work& work);
  void look_up(std::chrono::steady_clock::duration waited, int looks);
  [[nodiscard]] std::string where_ranks_are();
  [[nodiscard]] std::unique_ptr<Communicator> make_part(const SubGroup& members) const;
  [[noreturn]] void throw_lengths_differ(std::size_t length);
  [[nodiscard]] std::string name_of_part(const SubGroup& members) const;
  [[nodiscard]] std::string describe(std::string_view text) const;

  std::unique_ptr<OwnGroup> own_;                      // none: group_ is
  Group part_;                                         // none: somebody else's group
  c10::weak_intrusive_ptr<c10d::ProcessGroup> whole_;  // that it is a part of
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  int parts_ = 0;                // made so far
  Placement placement_;          // of the messages that are on no host
  c10::DeviceType host_device_;  // what messages of the host go by
  int rank_;
  int size_;
  std::string transport_;
  bool sums_on_device_;
  c10d::AllreduceOptions options_;
  std::string failure_;  // the first one; empty: none
  std::optional<CallBoard> board_;
  std::unique_ptr<Communicator> holder_of_board_;  // none: a part's
  std::shared_ptr<CallPublisher> publisher_;       // of the whole group
};

}  // namespace normscope::binding
