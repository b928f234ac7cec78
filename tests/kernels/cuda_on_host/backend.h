// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/device_kernels.h"

namespace normscope::cuda_on_host {

// The CUDA backend's kernels and grids, run on the host.
extern const DeviceKernels kKernels;

// The number of kernels launched so far.
[[nodiscard]] int launches() noexcept;

}  // namespace normscope::cuda_on_host
