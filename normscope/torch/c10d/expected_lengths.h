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
  [[nodiscard]] std::optional<std::size_t> next() const;

  void add(std::size_t length);

  // Forgets all lengths.
  void clear();

 private:
  using Lengths = std::vector<std::size_t>;

  Lengths last_;
  std::map<Lengths, std::size_t> following_;  // by those before
};

}  // namespace normscope::binding
