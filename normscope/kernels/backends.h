// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/device_kernels.h"
#include "normscope/kernels/kernels.h"

namespace normscope {

// The tables of all backends, from which kernels.cpp chooses.

namespace reference {
// The definition of correct: plain loops, one element at a time, all arithmetic in float64 or
// wider. Its tile is a whole (sample, channel), which keeps its results independent of how a batch
// is split over ranks.
extern const Kernels kKernels;
}  // namespace reference

namespace cpu {
// One backend per instruction set, compiled from the same source; from the plainest to the widest.
// Kernels::can_run tells which of them a machine can run.
extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
}  // namespace cpu

namespace cuda {
// For NVIDIA GPUs.
extern const DeviceKernels kKernels;
}  // namespace cuda

}  // namespace normscope
