// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

namespace normscope::binding {

// Expects the length of a group's next message. The messages of a training step come in the same
// order in every step, so the length that followed the last few lengths before is expected again.
//
// All ranks must expect the same. They do if each of them adds the lengths of all messages, which
// are equal on all ranks.
class ExpectedLengths {
 public:
  // nullopt if the last few lengths have not come in this order before.
  [[nodiscard]] std::optional<std::size_t> next() const {
    const auto found = following_.find(last_);
    return found == following_.end() ? std::nullopt : std::optional(found->second);
  }

  void add(std::size_t length) {
    if (following_.size() == kMostPlaces) following_.clear();
    following_[last_] = length;
    last_.push_back(length);
    if (last_.size() > kLengthsBefore) last_.erase(last_.begin());
  }

 private:
  using Lengths = std::vector<std::size_t>;

  // Enough to tell most places in a network apart. Where equal blocks of layers end, the
  // expectation is wrong once.
  static constexpr std::size_t kLengthsBefore = 8;

  // Programs whose messages never repeat must not fill the memory.
  static constexpr std::size_t kMostPlaces = 1 << 14;

  Lengths last_;
  std::map<Lengths, std::size_t> following_;  // by those before
};

}  // namespace normscope::binding
