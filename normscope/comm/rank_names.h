// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "normscope/comm/describe.h"

namespace normscope {

// The names of a group's ranks in errors. If the group is an internal part of a larger one, its
// ranks are named by their numbers in the larger group.
class RankNames {
 public:
  // A group that users know, with its own numbers.
  explicit RankNames(int size) : RankNames(numbers_of_ranks(size), size) {}

  // The part with the ranks `numbers` of a group of `size` ranks.
  RankNames(std::vector<int> numbers, int size) : numbers_(std::move(numbers)), size_(size) {}

  [[nodiscard]] const std::vector<int>& numbers() const noexcept { return numbers_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] int number(int rank) const { return numbers_[static_cast<std::size_t>(rank)]; }

  // "rank 1 of 4".
  [[nodiscard]] std::string name(int rank) const { return name_of_rank(number(rank), size_); }

  // "ranks 0, 2", of at least one rank.
  [[nodiscard]] std::string list(std::vector<int> ranks) const {
    for (int& rank : ranks) rank = number(rank);
    return list_of_ranks(ranks);
  }

  // "ranks 0, 2 of 4".
  [[nodiscard]] std::string names(const std::vector<int>& ranks) const {
    return list(ranks) + " of " + std::to_string(size_);
  }

 private:
  std::vector<int> numbers_;  // by rank
  int size_;
};

}  // namespace normscope
