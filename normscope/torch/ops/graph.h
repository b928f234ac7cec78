// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "normscope/torch/calls/arguments.h"

namespace normscope::binding {

// Forward and backward in a compiled graph (calls/recording.h). Functional ops compute the
// statistics and the gradient sums; they return new values of buffers instead of changing the
// buffers.

// The op batch_norm_statistics.
[[nodiscard]] const c10::TypedOperatorHandle<StatisticsOp>& statistics_op();

[[nodiscard]] ForwardTensors forward_in_graph(const ForwardOpArguments& op);
[[nodiscard]] BackwardTensors backward_in_graph(const BackwardOpArguments& op);

// The results of a backward, from those of the op batch_norm_gradient_sums.
[[nodiscard]] BackwardTensors backward_by_coefficients(const BackwardOpArguments& op,
                                                       const GradientTensors& sums);

}  // namespace normscope::binding
