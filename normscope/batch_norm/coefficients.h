// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "normscope/core/dtype.h"
#include "normscope/kernels/channel_view.h"
#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/results.h"
#include "normscope/kernels/statistics.h"

namespace normscope {

// Coefficients [slices, ., C] for a caller on the host that applies them itself. data nullptr: not
// wanted, and nothing is written.
struct WantedCoefficients {
  Coefficients to;
  DType x_dtype;
  std::int64_t channels;  // C

  void write_normalize(std::int64_t slice, Statistics statistics, ChannelView weight,
                       ChannelView bias) const;
  // sums: over the n elements of the norm batch.
  void write_input_gradient(std::int64_t slice, Statistics statistics, ChannelView weight,
                            GradientSums sums, double n) const;
};

}  // namespace normscope
