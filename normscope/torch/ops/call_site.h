// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "normscope/batch_norm/batch_norm.h"
#include "normscope/core/execution.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/tensors/device.h"
#include "normscope/torch/tensors/device_memory.h"

namespace normscope::binding {

// Where a call of batch_norm runs: on torch's threads, or on the current stream of x's device. That
// device stays current during this object's lifetime, because a process group may create streams
// and memory for the call.
class CallSite {
 public:
  explicit CallSite(const at::Tensor& x);
  CallSite(const CallSite&) = delete;
  CallSite& operator=(const CallSite&) = delete;

  [[nodiscard]] const Placement& placement() const noexcept { return placement_; }

  // Takes the memory that kernels work in. Must precede alone() and with(). If there are no
  // kernels for the device, throws an error that Python shows as RuntimeError.
  void prepare(const at::Tensor& x, std::int64_t slices);

  [[nodiscard]] CallContext alone() const noexcept;
  [[nodiscard]] CallContext with(const ExchangeUse& exchange, const ScopedCall& call);

 private:
  c10::OptionalDeviceGuard guard_;
  Placement placement_;
  Execution execution_;
  DeviceContext device_;
  std::optional<DeviceMemory> memory_;
};

}  // namespace normscope::binding
