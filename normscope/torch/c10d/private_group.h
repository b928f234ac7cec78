// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "normscope/torch/c10d/store.h"

namespace normscope::binding {

// A process group that carries only normscope's messages in host memory, among ranks of one of the
// program's groups.
//
// torch.distributed identifies a message only by its place in the order of calls. If a rank ran one
// step more than its peers, its message on the program's own group would be added to their next
// messages: silently if the lengths agree. Over Gloo, different lengths end the process, and a
// timeout breaks the group. Closing a separate group also tells the peers at once.
//
// Python makes and destroys it, which allows any backend of torch.distributed.
class OwnGroup {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Makes a group of all ranks of `group`, which Python knows by `name`. This is their first
  // meeting. `use` is a part of the new group's name. Throws TimeoutError, which names the ranks
  // that have not come, or CommunicationError if a rank has failed before or torch.distributed
  // cannot make the group.
  OwnGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name,
           const std::string& use, Milliseconds time_limit);

  // For a rank that will not come to the first meeting: tells its peers that it failed, and why.
  static void refuse(c10d::ProcessGroup& group, const std::string& name, const std::string& use,
                     std::string_view reason) noexcept;

  ~OwnGroup() { close(); }
  OwnGroup(const OwnGroup&) = delete;
  OwnGroup& operator=(const OwnGroup&) = delete;

  // Makes a group of some of the ranks. Collective over those ranks.
  [[nodiscard]] std::unique_ptr<OwnGroup> part(const std::string& name,
                                               const std::vector<int>& members) const;

  // nullptr if it was destroyed.
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> get() const { return group_.lock(); }

  // Ends the group. Peers that wait, or come later, find that this rank failed, and why.
  void fail(std::string_view reason) noexcept;

  // The same while a message is in progress. Ending the backend would wait for the message, so the
  // backend is kept until the process ends. Waiting peers find out when they ask the store.
  void abandon(std::string_view reason) noexcept;

  // Ends the group after an error of its backend. Returns the reason: the text of the rank that
  // failed first. If no rank has failed, returns `what`, the missing ranks, and where the ranks
  // are.
  [[nodiscard]] std::string fail_after(const std::string& what,
                                       const std::function<std::string()>& who_is_where) noexcept;

  // The reason of the first rank that failed, if any.
  [[nodiscard]] std::optional<std::string> failure() noexcept { return store_.failure(); }

  // Facts that the ranks tell each other besides their messages.
  [[nodiscard]] const GroupStore& store() const noexcept { return store_; }

 private:
  OwnGroup(std::string name, std::string parent, std::vector<int> ranks, GroupStore store,
           Milliseconds time_limit);

  void make();
  void close() noexcept;

  std::string name_;        // torch's name of this group
  std::string parent_;      // and of the program's group
  std::vector<int> ranks_;  // numbered as in the program's group
  GroupStore store_;
  Milliseconds time_limit_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_{c10::intrusive_ptr<c10d::ProcessGroup>()};
};

}  // namespace normscope::binding
