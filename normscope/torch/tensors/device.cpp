// SPDX-License-Identifier: Apache-2.0
#include "normscope/torch/tensors/device.h"

#include <ATen/ops/zeros.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace normscope::binding {

// No CUDA header is needed: c10 knows the stream of any device that a tensor is on.

Placement placement_of(const at::Tensor& x) {
  return {.memory = x.is_cpu() ? Memory::kHost : Memory::kDevice, .device = x.device().type()};
}

const DeviceKernels* kernels_for_devices() noexcept { return device_kernels(); }

const DeviceKernels& device_kernels_for(const at::Tensor& x) {
  TORCH_CHECK(device_kernels() != nullptr,
              "x: expected a tensor on the CPU, since this normscope was built without CUDA "
              "(NORMSCOPE_BUILD_CUDA), got one on ",
              x.device());
  return *device_kernels();
}

Stream current_stream(const at::Tensor& x) {
  const c10::impl::VirtualGuardImpl device(x.device().type());
  return {device.getStream(x.device()).native_handle(), Memory::kDevice};
}

at::Tensor zeros_for_report(std::int64_t size) {
  return at::zeros({size}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
}

}  // namespace normscope::binding
