// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "normscope/batch_norm/exchange.h"
#include "normscope/core/cache_lines.h"
#include "normscope/core/limbs.h"

namespace normscope {

// The message of one direction, for all channels: the limbs of its sums, then the header of
// Exchange.
class Message {
 public:
  explicit Message(std::int64_t channels)
      : channels_(channels),
        numbers_(static_cast<std::size_t>(limbs_size(channels) + kHeaderSize)) {}

  [[nodiscard]] LimbsView limbs() noexcept { return {numbers_.data(), channels_, channels_}; }

  // Replaces the limbs by their totals over the ranks; returns the total count.
  [[nodiscard]] double all_reduce(const CallLabel& label, double count, Exchange& exchange) {
    const std::span<double> header = std::span(numbers_).last(kHeaderSize);
    header[kCount] = count;
    exchange.all_reduce(label, numbers_, Stream{});
    return header[kCount];
  }

 private:
  std::int64_t channels_;
  AlignedVector<double> numbers_;
};

}  // namespace normscope
