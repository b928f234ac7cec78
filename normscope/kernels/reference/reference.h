// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/kernels.h"

namespace normscope::reference {

// The definition of correct: plain loops, one element at a time, all arithmetic in float64 or
// wider. Its tile is a whole (sample, channel), which keeps its results independent of how a batch
// is split over ranks.
extern const Kernels kKernels;

}  // namespace normscope::reference
