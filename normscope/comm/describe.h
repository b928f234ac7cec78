// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

namespace normscope {

// Texts that the errors of all communicators use.

// "rank 1 of 4".
[[nodiscard]] inline std::string name_of_rank(int rank, int size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

// "ranks 0, 2, 3".
[[nodiscard]] inline std::string list_of_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

// 0, 1, ... below `size`.
[[nodiscard]] inline std::vector<int> numbers_of_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// "2.5 s".
[[nodiscard]] inline std::string in_seconds(std::chrono::steady_clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace normscope
