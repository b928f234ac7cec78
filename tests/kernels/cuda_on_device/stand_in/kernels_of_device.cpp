// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda_on_device/kernels_of_device.h"

#include "tests/kernels/cuda_on_host/backend.h"

namespace normscope::testing {

const DeviceKernels& kernels_of_device() { return cuda_on_host::kKernels; }

}  // namespace normscope::testing
