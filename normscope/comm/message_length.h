// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace normscope {

// A message can carry its own length and the square of it. Their sums over R ranks are R * length
// and R * length^2 only if all ranks have this length. Both are exact while R * length^2 <= 2^53. A
// length of NaN equals no other.
inline constexpr std::size_t kLengthFields = 2;

inline void write_length(std::span<double> fields, double length) {
  fields[0] = length;
  fields[1] = length * length;
}

[[nodiscard]] inline bool lengths_agree(std::span<const double> sums, double length, int ranks) {
  return sums[0] == ranks * length && sums[1] == ranks * (length * length);
}

// The error if they do not. `lengths` [ranks].
[[nodiscard]] inline std::string text_of_different_lengths(const std::vector<double>& lengths) {
  std::string text = "all_reduce_sum: expected the same number of values from every rank, got ";
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    if (rank != 0) text += ", ";
    text += std::to_string(static_cast<std::int64_t>(lengths[rank])) + " from rank " +
            std::to_string(rank);
  }
  return text;
}

}  // namespace normscope
