// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "normscope/batch_norm/batch_norm.h"

namespace normscope::binding {

// DeviceContext::scratch for calls with the kernels and the stream of `device`: [size or more]
// zeros on x's device. Every stream keeps its own, because its calls run one after the other and
// each leaves zeros. A graph gets a new one for each call, because it may run at any time, next to
// any stream. This is not memory of torch's allocator, which during a call may take memory from a
// pool of a graph and use it again afterwards. If the kernels cannot run there, throws an error
// that Python shows as RuntimeError.
[[nodiscard]] double* device_scratch(const at::Tensor& x, std::int64_t size,
                                     const DeviceContext& device);

}  // namespace normscope::binding
