// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda_on_device/kernels_of_device.h"

namespace normscope::testing {

const DeviceKernels& kernels_of_device() { return *device_kernels(); }

}  // namespace normscope::testing
