// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "normscope/batch_norm/call.h"
#include "normscope/core/limbs.h"
#include "normscope/core/tensor_view.h"
#include "normscope/kernels/statistics.h"

namespace normscope {

// Calls work(begin, end, execution) for chunks of channels that fit the caches: the second sweep
// then finds the input of the first in the cache. Chunks run concurrently, each on one thread. A
// single chunk gets all threads.
template <class Work>
void for_channel_chunks(const ResolvedContext& context, const TensorView& x, int tensors,
                        const Work& work) {
  if (x.channels == 0) {
    work(std::int64_t{0}, std::int64_t{0}, context.execution);
    return;
  }
  const std::int64_t chunk =
      context.kernels.channels_per_chunk(x, tensors, context.execution.threads);
  const std::int64_t chunks = (x.channels + chunk - 1) / chunk;
  if (chunks == 1) {
    work(std::int64_t{0}, x.channels, context.execution);
    return;
  }
  const Execution alone;
  context.execution.parallel_for(chunks, [&](std::int64_t i) {
    const std::int64_t begin = i * chunk;
    const std::int64_t end = begin + chunk < x.channels ? begin + chunk : x.channels;
    work(begin, end, alone);
  });
}

// Sets limbs to zero.
inline void clear(LimbsView limbs) noexcept {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) std::fill_n(limbs.limb(sum, k), limbs.channels, 0.0);
  }
}

// The samples [begin, end) of a slice, cut as by torch.chunk.
struct SampleRange {
  std::int64_t begin;
  std::int64_t end;
};
[[nodiscard]] inline SampleRange samples_of_slice(std::int64_t samples, std::int64_t slices,
                                                  std::int64_t slice) noexcept {
  const std::int64_t size = (samples + slices - 1) / slices;
  return {std::min(slice * size, samples), std::min((slice + 1) * size, samples)};
}

// The channels [begin, end) of a slice, and limbs set to zero for their sums.
struct SlicePart {
  std::int64_t slice;
  SampleRange samples;
  std::int64_t begin;
  std::int64_t end;
  LimbsView limbs;

  template <class View>
  [[nodiscard]] View of(const View& tensor) const noexcept {
    return tensor.sample_range(samples.begin, samples.end).channel_range(begin, end);
  }
};

// All of x, as one slice.
[[nodiscard]] inline SlicePart whole(const TensorView& x, LimbsView limbs) noexcept {
  return {0, {0, x.samples}, 0, x.channels, limbs};
}

// The successive updates of the running statistics in one call.
class RunningUpdates {
 public:
  // arguments: of forward, or of batch_norm_finalize().
  template <class Arguments>
  explicit RunningUpdates(const Arguments& arguments)
      : update_(arguments.running),
        is_cumulative_(arguments.running_average == RunningAverage::kCumulative),
        updates_before_(is_cumulative_ ? *update_.updates : 0) {}

  // The update that follows `earlier` others of this call.
  [[nodiscard]] RunningUpdate after(std::int64_t earlier) const {
    RunningUpdate update = update_;
    if (is_cumulative_) update.momentum = cumulative_momentum(updates_before_ + earlier);
    return update;
  }

 private:
  RunningUpdate update_;
  bool is_cumulative_;
  std::int64_t updates_before_;  // before this call
};

// Calls work(part, execution) for chunks of channels of all slices, with limbs that are zero
// before. The slices of a channel come one after the other. One thread takes all slices of its
// chunk, which leaves one barrier at the end instead of one per slice.
template <class Work>
void for_slice_parts(const ResolvedContext& context, const TensorView& x, std::int64_t slices,
                     int tensors, LimbsView all_limbs, const Work& work) {
  const auto samples_of = [&](std::int64_t slice) {
    return samples_of_slice(x.samples, slices, slice);
  };
  const SampleRange largest = samples_of(0);
  const TensorView one_slice = x.sample_range(largest.begin, largest.end);
  for_channel_chunks(context, one_slice, tensors,
                     [&](std::int64_t begin, std::int64_t end, const Execution& execution) {
                       const LimbsView limbs = all_limbs.channel_range(begin, end);
                       for (std::int64_t slice = 0; slice < slices; ++slice) {
                         if (slice > 0) clear(limbs);
                         work(SlicePart{slice, samples_of(slice), begin, end, limbs}, execution);
                       }
                     });
}

}  // namespace normscope
