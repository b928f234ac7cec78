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

#include "normscope/comm/sub_group.h"
#include "normscope/torch/group_store.h"

namespace normscope::binding {

// A process group that carries nothing but normscope's messages of the host, between ranks of a
// group that is the program's.
//
// torch.distributed knows a message by its place in the order of calls alone. On the program's own
// group a rank that does one step more than its peers would have its message added to whatever they
// send there, in silence where the lengths agree; over Gloo other lengths end the process, and a
// time limit breaks the group. Closing this one also tells the peers, at once.
//
// Python makes it, so that it can have any backend of torch.distributed, and destroys it.
class OwnGroup {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Of all ranks of `group`, which Python knows by `name`: their first meeting. `use` tells groups
  // for different uses of one group apart. Throws TimeoutError, naming ranks that have not come;
  // CommunicationError where a rank has failed before, or torch.distributed can make no such group.
  OwnGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name,
           const std::string& use, Milliseconds time_limit);

  // Of a rank that will not come to the first meeting: its peers find that it failed, and why.
  static void refuse(c10d::ProcessGroup& group, const std::string& name, const std::string& use,
                     std::string_view reason) noexcept;

  ~OwnGroup() { close(); }
  OwnGroup(const OwnGroup&) = delete;
  OwnGroup& operator=(const OwnGroup&) = delete;

  // Of some of its ranks. Collective over those.
  [[nodiscard]] std::unique_ptr<OwnGroup> part(const std::string& name,
                                               const SubGroup& members) const;

  // nullptr where it was destroyed.
  [[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> get() const { return group_.lock(); }

  // Ends it: peers that wait, or come later, find that this rank failed, and why.
  void fail(std::string_view reason) noexcept;

  // The same while a message is under way, for which the end of a backend would wait: it is left to
  // the process's end. Peers that wait find out when they ask the store.
  void abandon(std::string_view reason) noexcept;

  // Ends it after an error of its backend. Returns why: the text of the rank that failed first, or
  // else `what`, which ranks are missing,
  // and where they are.
  [[nodiscard]] std::string fail_after(const std::string& what,
                                       const std::function<std::string()>& who_is_where) noexcept;

  // Why a rank failed, if one has.
  [[nodiscard]] std::optional<std::string> failure() noexcept { return store_.failure(); }

  // What the ranks tell each other next to their messages.
  [[nodiscard]] const GroupStore& store() const noexcept { return store_; }

 private:
  OwnGroup(std::string name, std::string parent, std::vector<int> ranks, GroupStore store,
           Milliseconds time_limit);

  void make();
  void close() noexcept;

  std::string name_;        // as torch knows this group
  std::string parent_;      // and the program's
  std::vector<int> ranks_;  // in that, of this group's
  GroupStore store_;
  Milliseconds time_limit_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_{c10::intrusive_ptr<c10d::ProcessGroup>()};
};

}  // namespace normscope::binding
