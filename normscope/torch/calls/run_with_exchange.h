// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "normscope/core/error.h"
#include "normscope/torch/calls/checks.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/tensors/device.h"

namespace normscope::binding {

// with_exchange() for a call with x. Converts errors to torch's types.
template <class Body>
auto run_with_exchange(const at::Tensor& x, Direction direction, const ScopedCall& call,
                       const std::optional<Placement>& placement, const Body& body) {
  bool has_exchange = false;
  return as_torch([&] {
    try {
      return with_exchange(direction, call, placement, [&](const ExchangeUse& use) {
        has_exchange = use.get() != nullptr;
        return body(use);
      });
    } catch (const OneValueError&) {
      // On a device the error appears in this rank's next call, which has another x.
      if (has_exchange && placement_of(x).memory == Memory::kDevice) throw;
      if (has_exchange) throw_one_value_per_channel(call);
      throw_one_value_per_channel(x, call.layer);
    }
  });
}

// run_with_exchange() for a call whose messages torch's kernels compute; x's device is current in
// it.
template <class Body>
auto run_with_message(const at::Tensor& x, Direction direction, const ScopedCall& call,
                      const Body& body) {
  const c10::OptionalDeviceGuard guard(x.is_cpu() ? std::nullopt : std::optional(x.device()));
  return run_with_exchange(x, direction, call, placement_of_messages(call, x),
                           [&](const ExchangeUse& use) {
                             TensorMessage message(use);
                             return body(message);
                           });
}

}  // namespace normscope::binding
