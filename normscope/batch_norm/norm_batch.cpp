// SPDX-License-Identifier: Apache-2.0
#include "normscope/batch_norm/norm_batch.h"

#include <algorithm>
#include <string>

#include "normscope/core/error.h"

namespace normscope {

Message::Message(std::int64_t channels, std::int64_t count)
    : channels_(channels),
      numbers_(static_cast<std::size_t>(limbs_size(channels) + Exchange::kHeaderSize)) {
  numbers_[static_cast<std::size_t>(limbs_size(channels))] = static_cast<double>(count);
}

void Message::add(const Message& other) noexcept {
  for (std::size_t i = 0; i < numbers_.size(); ++i) numbers_[i] += other.numbers_[i];
}

ResolvedContext resolve(const CallContext& context) {
  static const Execution kThisThread;
  return {context.kernels == nullptr ? default_kernels() : *context.kernels,
          context.execution == nullptr ? kThisThread : *context.execution,
          context.exchange != nullptr && context.exchange->sends() ? context.exchange : nullptr};
}

std::int64_t slice_count(std::int64_t samples, std::int64_t wanted) {
  if (wanted < 1) {
    throw ArgumentError("slices: expected at least 1, got " + std::to_string(wanted));
  }
  if (samples == 0) return 1;
  const std::int64_t size = (samples + wanted - 1) / wanted;
  return (samples + size - 1) / size;
}

SampleRange samples_of_slice(std::int64_t samples, std::int64_t slices,
                             std::int64_t slice) noexcept {
  const std::int64_t size = (samples + slices - 1) / slices;
  return {std::min(slice * size, samples), std::min((slice + 1) * size, samples)};
}

}  // namespace normscope
