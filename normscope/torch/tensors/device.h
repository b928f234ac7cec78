// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "normscope/core/stream.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope::binding {

// Where the tensors of a call are: the kind of memory for kernels, and torch's device type.
struct Placement {
  Memory memory = Memory::kHost;
  c10::DeviceType device = c10::DeviceType::CPU;

  auto operator<=>(const Placement&) const = default;
};

[[nodiscard]] Placement placement_of(const at::Tensor& x);

// The kernels of this build for devices; nullptr if it has none.
[[nodiscard]] const DeviceKernels* kernels_for_devices() noexcept;

// The kernels for x's device, which must not be the host. If this build has none, throws an error
// that Python shows as RuntimeError.
[[nodiscard]] const DeviceKernels& device_kernels_for(const at::Tensor& x);

// The stream on which torch currently queues work for x's device.
[[nodiscard]] Stream current_stream(const at::Tensor& x);

// Zeros [size], int32, in host memory that devices can write.
[[nodiscard]] at::Tensor zeros_for_report(std::int64_t size);

}  // namespace normscope::binding
