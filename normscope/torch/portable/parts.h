// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// The ops of batch_norm/moments.h, and a forward from its statistics, by operations of torch: for
// tensors that uses_torch_kernels() accepts. Arguments are checked already.

[[nodiscard]] at::Tensor portable_moments(const at::Tensor& x);
[[nodiscard]] at::Tensor portable_finalize(const FinalizeOpArguments& op);
[[nodiscard]] GradientTensors portable_part_gradient_sums(const at::Tensor& dy, const at::Tensor& x,
                                                          const at::Tensor& statistics);
[[nodiscard]] at::Tensor portable_part_input_gradient(const at::Tensor& dy, const at::Tensor& x,
                                                      const OptionalTensor& weight,
                                                      const at::Tensor& statistics,
                                                      const at::Tensor& sums);
[[nodiscard]] at::Tensor portable_with_statistics(const WithStatisticsOpArguments& op);

}  // namespace normscope::binding
