// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/kernels.h"

namespace normscope::cuda {

// Kernels for NVIDIA GPUs. All pointers are the device's, those to counts and sums too; work is put
// on execution.stream, and nothing waits for it.
extern const Kernels kKernels;

}  // namespace normscope::cuda
