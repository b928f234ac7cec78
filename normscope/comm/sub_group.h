// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "normscope/comm/communicator.h"
#include "normscope/core/attributes.h"

namespace normscope NORMSCOPE_EXPORT {

// One part of a group that splits.
struct SubGroup {
  std::vector<int> members;  // ranks of the parent, in the order of the sub-group's ranks
  int rank = 0;              // this rank's place in `members`

  // The member that creates the new group; the others join it.
  [[nodiscard]] int leader() const noexcept { return members.front(); }
};

// The ranks of `parent` that pass the same `color`, ordered by `key`, then by rank. Collective.
[[nodiscard]] SubGroup agree_on_sub_group(Communicator& parent, int color, int key);

}  // namespace normscope
