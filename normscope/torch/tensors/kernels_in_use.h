// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace normscope::binding {

// Whether torch's kernels normalize x, because there are none of this library for x's device or
// because NORMSCOPE_DEVICE_KERNELS=torch asks for them. False for tensors that no layer takes, such
// as sparse ones, whose errors the dispatcher raises.
[[nodiscard]] bool uses_torch_kernels(const at::Tensor& x);

// Whether NORMSCOPE_DEVICE_KERNELS=torch asked for torch's kernels when this was first needed.
[[nodiscard]] bool torch_kernels_are_forced();

// Whether torch has the kernels of its own synchronized layer (batch_norm_stats and others) for x's
// device: CUDA, ROCm and XPU. Others use native_batch_norm and its backward.
[[nodiscard]] bool has_synchronized_kernels(const at::Tensor& x);

// Which kernels normalize tensors of this device of torch, and why, for people.
[[nodiscard]] std::string kernels_of_device(std::string_view device);

}  // namespace normscope::binding
