// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

namespace normscope {

// What errors of communicators have in common.

// "rank 1 of 4".
[[nodiscard]] inline std::string name_of_rank(int rank, int size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

// "ranks 0, 2, 3", of at least one rank.
[[nodiscard]] inline std::string list_of_ranks(const std::vector<int>& ranks) {
  std::string text = (ranks.size() == 1 ? "rank " : "ranks ") + std::to_string(ranks[0]);
  for (std::size_t i = 1; i < ranks.size(); ++i) text += ", " + std::to_string(ranks[i]);
  return text;
}

// "2.5 s".
[[nodiscard]] inline std::string in_seconds(std::chrono::steady_clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace normscope
