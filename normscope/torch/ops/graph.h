// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "normscope/torch/ops/operators.h"

namespace normscope::binding {

// Forward and backward in a compiled graph. Functional ops compute the statistics and the gradient
// sums; they return new values of buffers instead of changing the buffers. The argument `graph`
// selects how the elementwise part is recorded:
// * "fused": the elementwise part is left to torch's ops, which a compiler fuses with others
//   (docs/numerics.md, "Compiled graphs", says what that may round differently).
// * "exact": it is one op with the bits of eager mode.
// * "exported": as "fused". But if no other rank shares the statistics, torch's batch norm replaces
//   the whole layer, so that the program can be used without this library.
// What follows "fused" or "exact" is recorder(), because torch keeps compiled graphs on disk and
// finds them by the calls of the layers.
//
// Ranks must meet in the same order, however a compiler reorders the graph. Every exchange is
// therefore between two calls of keep_order, which compilers keep in order and never repeat
// (ops.py tells them). That op takes only small tensors, because the arguments of such ops may
// come in any layout.

// Whether ops that are called now are recorded for a functional graph, as by AOTAutograd.
[[nodiscard]] bool is_recorded_for_a_graph();

// The op batch_norm_statistics.
[[nodiscard]] const c10::TypedOperatorHandle<StatisticsOp>& statistics_op();

// Copies of `values` [...] that compilers compute in program order, among all such calls.
[[nodiscard]] std::vector<at::Tensor> keep_order(const std::vector<at::Tensor>& values);

// Whether torch's batch norm replaces the layer.
[[nodiscard]] bool is_left_to_torch(const ForwardOpArguments& op);

[[nodiscard]] std::tuple<at::Tensor, at::Tensor> forward_in_graph(const ForwardOpArguments& op);
[[nodiscard]] BackwardTensors backward_in_graph(const BackwardOpArguments& op);

}  // namespace normscope::binding
