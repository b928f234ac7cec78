// SPDX-License-Identifier: Apache-2.0
//
// Replaces normscope/torch/tensors/device.cpp: tensors on the CPU count as a device's, with the
// CUDA kernels run on the host. Everything between Python and those kernels then runs without a
// GPU.
#include "normscope/torch/tensors/device.h"

#include <ATen/ops/zeros.h>

#include "tests/kernels/cuda_on_host/backend.h"

namespace normscope::binding {

Placement placement_of(const at::Tensor& x) {
  return {.memory = Memory::kDevice, .device = x.device().type()};
}

const DeviceKernels* kernels_for_devices() noexcept { return &cuda_on_host::kKernels; }

const DeviceKernels& device_kernels_for(const at::Tensor& /*x*/) { return cuda_on_host::kKernels; }

Stream current_stream(const at::Tensor& /*x*/) { return {.memory = Memory::kDevice}; }

at::Tensor zeros_for_report(std::int64_t size) { return at::zeros({size}, at::kInt); }

}  // namespace normscope::binding
