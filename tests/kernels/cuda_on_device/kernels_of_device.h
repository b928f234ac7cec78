// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/device_kernels.h"

namespace normscope::testing {

// Those of the GPU, or what stands in for one.
[[nodiscard]] const DeviceKernels& kernels_of_device();

}  // namespace normscope::testing
