// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "normscope/batch_norm/batch_norm.h"

namespace normscope::binding {

// DeviceContext::scratch for calls with the kernels and on the stream of `device`, [size or more]
// float64 on x's device. Every stream has its own, which is kept: its calls follow one another, and
// each leaves zeros. A graph gets one for each call, since it may run at any time, next to any
// stream. Throws what Python shows as RuntimeError if the kernels cannot run there.
[[nodiscard]] at::Tensor device_scratch(const at::Tensor& x, std::int64_t size,
                                        const DeviceContext& device);

}  // namespace normscope::binding
