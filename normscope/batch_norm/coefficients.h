// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/dtype.h"
#include "normscope/kernels/channel_view.h"
#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/results.h"
#include "normscope/kernels/statistics.h"

namespace normscope {

// Coefficients [slices, ., C] that a caller on the host wants to apply by itself; data nullptr:
// nobody does, and nothing is written.
struct WantedCoefficients {
  Coefficients to;
  DType x_dtype;
  std::int64_t channels;  // C

  // The channels of `statistics` are `begin` and those after it, `count` of them; so are those of
  // the other arguments.
  void write_normalize(std::int64_t slice, std::int64_t begin, std::int64_t count,
                       Statistics statistics, ChannelView weight, ChannelView bias) const;
  // sums: over the n elements of the norm batch.
  void write_input_gradient(std::int64_t slice, std::int64_t begin, std::int64_t count,
                            Statistics statistics, ChannelView weight, GradientSums sums,
                            double n) const;
};

}  // namespace normscope
