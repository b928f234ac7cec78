// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "normscope/core/limbs.h"
#include "normscope/kernels/statistics.h"

namespace normscope {

// Sets limbs to zero.
inline void clear(LimbsView limbs) noexcept {
  for (int sum = 0; sum < kSums; ++sum) {
    for (int k = 0; k < kLimbs; ++k) std::fill_n(limbs.limb(sum, k), limbs.channels, 0.0);
  }
}

// One of the slices of a batch, cut as by torch.chunk: the samples [begin, end).
struct Slice {
  std::int64_t index;
  std::int64_t begin;
  std::int64_t end;

  template <class View>
  [[nodiscard]] View of(const View& tensor) const noexcept {
    return tensor.sample_range(begin, end);
  }
};

[[nodiscard]] inline Slice slice_of(std::int64_t samples, std::int64_t slices,
                                    std::int64_t index) noexcept {
  const std::int64_t size = (samples + slices - 1) / slices;
  return {index, std::min(index * size, samples), std::min((index + 1) * size, samples)};
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

}  // namespace normscope
