// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "normscope/core/stream.h"
#include "normscope/kernels/device_kernels.h"

namespace normscope::binding {

// Where the tensors of a call lie: whose memory it is to kernels, and what torch calls it.
struct Placement {
  Memory memory = Memory::kHost;
  c10::DeviceType device = c10::DeviceType::CPU;

  auto operator<=>(const Placement&) const = default;
};

[[nodiscard]] Placement placement_of(const at::Tensor& x);

// The kernels for x's device, which is not the host. Throws what Python shows as RuntimeError if
// this build has none.
[[nodiscard]] const DeviceKernels& device_kernels_for(const at::Tensor& x);

// What torch queues work for x's device on at present.
[[nodiscard]] Stream current_stream(const at::Tensor& x);

// Zeros [size] int32 in memory of the host that devices can write.
[[nodiscard]] at::Tensor zeros_for_report(std::int64_t size);

}  // namespace normscope::binding
