// SPDX-License-Identifier: Apache-2.0
#include "normscope/comm/sub_group.h"

#include <algorithm>
#include <cstddef>

namespace normscope {

SubGroup agree_on_sub_group(Communicator& parent, int color, int key) {
  // The sum gathers: all other ranks add zeros, and every int is exact as a float64.
  const auto ranks = static_cast<std::size_t>(parent.size());
  std::vector<double> colors_and_keys(2 * ranks);
  const std::span colors(colors_and_keys.data(), ranks);
  const std::span keys(colors_and_keys.data() + ranks, ranks);
  const auto own = static_cast<std::size_t>(parent.rank());
  colors[own] = color;
  keys[own] = key;
  parent.all_reduce_sum(colors_and_keys);

  SubGroup group;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (colors[rank] == colors[own]) group.members.push_back(static_cast<int>(rank));
  }
  std::ranges::stable_sort(group.members, {},
                           [&](int rank) { return keys[static_cast<std::size_t>(rank)]; });
  group.rank =
      static_cast<int>(std::ranges::find(group.members, parent.rank()) - group.members.begin());
  return group;
}

}  // namespace normscope
