// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda {

// Kernels for NVIDIA GPUs.
extern const DeviceKernels kKernels;

}  // namespace normscope::cuda
