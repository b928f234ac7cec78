// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include "normscope/kernels/results.h"
#include "normscope/torch/calls/arguments.h"
#include "normscope/torch/tensors/tensor_view.h"

namespace normscope::binding {

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

}  // namespace normscope::binding
