// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "normscope/torch/c10d/own_group.h"

namespace normscope::binding {

// The rendezvous of a group's ranks, which any thread of this rank may end.
class Rendezvous {
 public:
  // From begin() to end() this rank takes part.
  void begin() { set_open(/*open=*/true); }
  void end() { set_open(/*open=*/false); }

  // The ranks wait for each other in `group`.
  void begin_in(const std::shared_ptr<OwnGroup>& group) {
    const std::lock_guard lock(mutex_);
    group_ = group;
    if (!refusal_.empty()) group_->publish_failure(refusal_);
  }

  // Notifies all ranks that this one fails. Does nothing if this one takes no part.
  void fail(std::string_view reason) {
    std::shared_ptr<OwnGroup> group;
    {
      const std::lock_guard lock(mutex_);
      if (!is_open_) return;
      group = group_;
      if (!group) refusal_ = reason;
    }
    if (group) group->publish_failure(reason);
  }

 private:
  void set_open(bool open) {
    const std::lock_guard lock(mutex_);
    is_open_ = open;
    group_ = nullptr;
    refusal_.clear();
  }

  std::mutex mutex_;
  bool is_open_ = false;
  std::shared_ptr<OwnGroup> group_;  // once its name is known
  std::string refusal_;              // before that
};

}  // namespace normscope::binding
