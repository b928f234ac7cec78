// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "normscope/batch_norm/batch_norm.h"

namespace normscope {

// What a direction sends, for all channels: the limbs of its sums, then Exchange's header, which
// begins with the count.
class Message {
 public:
  Message(std::int64_t channels, std::int64_t count);

  [[nodiscard]] LimbsView limbs() noexcept { return {numbers_.data(), channels_, channels_}; }
  [[nodiscard]] const double* count() const noexcept {
    return numbers_.data() + limbs_size(channels_);
  }
  [[nodiscard]] std::span<double> numbers() noexcept { return numbers_; }

  // Adds another message's sums and count, as the ranks' are added.
  void add(const Message& other) noexcept;

 private:
  std::int64_t channels_;
  std::vector<double> numbers_;
};

// Where a call runs, with every default filled in.
struct ResolvedContext {
  const Kernels& kernels;
  const Execution& execution;
  Exchange* exchange;  // nullptr where nothing is sent
};
[[nodiscard]] ResolvedContext resolve(const CallContext& context);

// Calls work(begin, end, execution) for chunks of channels that fit a core's cache, so that what
// one sweep has read is still there for the next. Chunks run at once, each on one thread; where one
// chunk is all there is, it gets all threads.
template <class Work>
void for_channel_chunks(const ResolvedContext& context, const TensorView& x, int tensors,
                        const Work& work) {
  if (x.channels == 0) return;
  const std::int64_t chunk =
      context.kernels.channels_per_chunk(x, tensors, context.execution.threads);
  const std::int64_t chunks = (x.channels + chunk - 1) / chunk;
  if (chunks == 1) {
    work(std::int64_t{0}, x.channels, context.execution);
    return;
  }
  Execution alone;
  alone.stream = context.execution.stream;
  context.execution.parallel_for(chunks, [&](std::int64_t i) {
    const std::int64_t begin = i * chunk;
    const std::int64_t end = begin + chunk < x.channels ? begin + chunk : x.channels;
    work(begin, end, alone);
  });
}

// The statistics of slice `slice` in an array [slices, 3, C].
template <class Number>
[[nodiscard]] BasicStatistics<Number> statistics_of_slice(Number* statistics, std::int64_t slice,
                                                          std::int64_t channels) noexcept {
  Number* begin = statistics + slice * statistics_size(1, channels);
  return {begin, begin + channels, begin + 2 * channels};
}

// The samples [begin, end) of a slice: those of torch.chunk.
struct SampleRange {
  std::int64_t begin;
  std::int64_t end;
};
[[nodiscard]] SampleRange samples_of_slice(std::int64_t samples, std::int64_t slices,
                                           std::int64_t slice) noexcept;

}  // namespace normscope
