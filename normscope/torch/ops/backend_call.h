// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include "normscope/core/error.h"
#include "normscope/torch/errors.h"
#include "normscope/torch/groups/exchanges.h"
#include "normscope/torch/groups/tensor_message.h"
#include "normscope/torch/ops/arguments.h"
#include "normscope/torch/tensors/device.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {

// Registers the same kernels for the devices of torch: x tells which to use. Not for sparse,
// quantized and nested tensors: the dispatcher's error for those names the op and the kind of
// tensor.
#define NORMSCOPE_FOR_ALL_DEVICES(register_ops)                      \
  TORCH_LIBRARY_IMPL(normscope, CPU, m) { register_ops(m); }         \
  TORCH_LIBRARY_IMPL(normscope, CUDA, m) { register_ops(m); }        \
  TORCH_LIBRARY_IMPL(normscope, XPU, m) { register_ops(m); }         \
  TORCH_LIBRARY_IMPL(normscope, MPS, m) { register_ops(m); }         \
  TORCH_LIBRARY_IMPL(normscope, HPU, m) { register_ops(m); }         \
  TORCH_LIBRARY_IMPL(normscope, MTIA, m) { register_ops(m); }        \
  TORCH_LIBRARY_IMPL(normscope, PrivateUse1, m) { register_ops(m); } \
  static_assert(true)

[[nodiscard]] inline OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// Running statistics as kernels write them, in contiguous tensors and int64. Other buffers are
// copied before a call, and get its results after it.
class WritableBuffers {
 public:
  explicit WritableBuffers(const RunningTensors& given)
      : given_(given),
        mean_(contiguous(given.mean)),
        var_(contiguous(given.var)),
        updates_(given.updates) {
    // Tested first, because the call of an operation takes time.
    if (updates_ && updates_->scalar_type() != at::kLong) updates_ = updates_->to(at::kLong);
  }

  [[nodiscard]] RunningTensors tensors() const { return {mean_, var_, updates_}; }

  void write_back() const {
    if (given_.mean && !mean_->is_same(*given_.mean)) given_.mean->copy_(*mean_);
    if (given_.var && !var_->is_same(*given_.var)) given_.var->copy_(*var_);
    const OptionalTensor& updates = given_.updates;
    // Averaged models have fractions of updates.
    if (updates && !updates_->is_same(*updates)) updates->add_(*updates_ - updates->to(at::kLong));
  }

 private:
  RunningTensors given_;
  OptionalTensor mean_;
  OptionalTensor var_;
  OptionalTensor updates_;
};

// Lets a call update running statistics. `arguments` of batch_norm_forward() or _finalize().
template <class Arguments>
void update_running(const RunningTensors& running, std::optional<double> momentum,
                    Arguments& arguments) {
  arguments.running.mean = mutable_channel_view(running.mean);
  arguments.running.var = mutable_channel_view(running.var);
  arguments.running.momentum = momentum.value_or(0.0);
  // As in torch, running statistics do not change if nothing counts a cumulative average's updates.
  if (!running.updates) return;
  arguments.running.updates = running.updates->mutable_data_ptr<std::int64_t>();
  if (!momentum) arguments.running_average = RunningAverage::kCumulative;
}

// Tells autograd that a buffer was written.
inline void bump_version(const OptionalTensor& buffer) {
  if (buffer && !buffer->is_inference()) ::torch::autograd::impl::bump_version(*buffer);
}

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
