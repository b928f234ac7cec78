// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "normscope/kernels/device_kernels.h"

namespace normscope::testing {

// The kernels of the GPU, or of its stand-in.
[[nodiscard]] const DeviceKernels& kernels_of_device();

}  // namespace normscope::testing
